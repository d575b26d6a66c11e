"""The KFP component that lists the variants of a study, so that a person fills in names. No logic."""

from kfp.dsl import component

from components import images


@component(base_image=images.image("variants"), install_kfp_package=False)
def variants(variants: list[str], seeds: list[int]) -> list:
    """List the variants of a study, each once a seed.

    Args:
        variants: Names, each INITIALIZATION[+CORPUS[@EPOCH][+unfrozen]][+TASKS], such as centroid+cpt@4,
            mean+gti+unfrozen or mean+lc-rec.
        seeds: Seeds; every variant is trained once with each.
    """
    from sidgraft.variants import plan_variants

    return plan_variants(variants, seeds)
