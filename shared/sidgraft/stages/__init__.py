"""The stages of the pipeline: one file and one public function a stage."""
