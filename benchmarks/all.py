"""Run all benchmarks in turn and render their results. Run: python benchmarks/all.py [--quick] [--data DIR] [NAME ...].

Each result is the JSON line that a benchmark prints last, kept in results.jsonl with the command and the machine; the
table of RESULTS.md is rendered from that file, and growth.svg drawn. Only full runs on a quiet machine are kept: with
--quick, or where other processes use the same processors, results are shown and not recorded. `make bench` runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import growth

HERE = Path(__file__).resolve().parent
NAMES = (
    "decode", "constraint", "ground", "finetune", "quantize", "embed", "parquet", "pipeline", "startup", "growth",
)  # fmt: skip
RECORDS, PAGE, PLOT = HERE / "results.jsonl", HERE / "RESULTS.md", HERE / "growth.svg"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
BUSY = 0.1  # of the time of the processors at hand, used by others: from there on nothing is recorded


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the small sizes, under a minute each; not recorded")
    parser.add_argument("--data", metavar="FOLDER", help="finetune: compare on the data there, too")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}; all when none is given")
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; they are {', '.join(NAMES)}")
    records = {record["name"]: record for record in read_records()}
    failed = []
    for name in args.names or NAMES:
        busy = used_by_others()
        command = [f"benchmarks/{name}.py", *(["--quick"] if args.quick else []), "--json"]
        if args.data and name == "finetune":
            command += ["--data", args.data]
        print(f"\n== python {' '.join(command)}", flush=True)
        started = time.monotonic()
        done = subprocess.run([sys.executable, *command], cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        if done.returncode:
            failed.append(name)
            continue
        record = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {time.monotonic() - started:.0f} s")
        busy = max(busy, used_by_others())
        if args.quick or busy > BUSY:
            reason = "quick" if args.quick else f"other processes use {busy:.0%} of the processors"
            print(f"{name}: not recorded ({reason})")
            continue
        shown = " ".join(Path(part).name if part == args.data else part for part in command)
        records[name] = record | {"command": f"python {shown}", "machine": machine()}
        RECORDS.write_text("".join(json.dumps(records[n]) + "\n" for n in NAMES if n in records), encoding="utf-8")
        if "sizes" in record:
            growth.draw(record["sizes"], PLOT)
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_records()), encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def read_records() -> list[dict[str, Any]]:
    """The recorded results, in the order of NAMES."""
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.exists() else []
    return [json.loads(line) for line in lines]


def used_by_others() -> float:
    """Share of the time of the processors that this process may use, over a second in which it sleeps."""
    mine = {f"cpu{n}" for n in os.sched_getaffinity(0)}

    def read() -> tuple[int, int]:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        times = [[int(n) for n in fields[1:9]] for fields in lines if fields[0] in mine]
        return sum(map(sum, times)), sum(each[3] + each[4] for each in times)

    (all_before, idle_before), _ = read(), time.sleep(1)
    all_after, idle_after = read()
    return 1 - (idle_after - idle_before) / max(all_after - all_before, 1)


def machine() -> str:
    """The machine in general terms: processors and instruction set."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
    best = next((name for flag, name in known.items() if flag in flags), "")
    return ", ".join(part for part in (f"{os.cpu_count()} cores", platform.machine(), best) if part)


def with_table(page: str, records: list[dict[str, Any]]) -> str:
    """The page with the text between its two marks replaced by the table of these records."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(records)}\n{END}{after}"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: one line a ratio, and under it for each benchmark what was equal, the roof and the command."""
    missing = [name for name in NAMES if name not in {record["name"] for record in records}]
    lines = []
    if records:
        lines += ["| benchmark | against | times faster | goal | reached |", "|---|---|---|---|---|"]
    for record in records:
        for peer, (ratio, goal) in record["ratios"].items():
            reached = "yes" if ratio >= goal else "no"
            lines.append(f"| {record['name']} | {peer} | {ratio:.4g} | {goal:g} | {reached} |")
    lines += [""] if records else []
    for record in records:
        facts = [
            ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record[part].items())
            for part in ("equal", "roof")
        ]
        lines.append(
            f"- **{record['name']}** ({record['about']}): `{record['command']}` on {record['machine']},"
            f" threads: {record['threads']}. Equal: {facts[0]}. Roof: {facts[1]}."
        )
    if any("sizes" in record for record in records):
        lines.append(f"\n![Time and peak memory against items, with the exponents of growth]({PLOT.name})")
    if missing:
        lines.append(f"\nNot measured on a quiet machine yet: {', '.join(missing)}.")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    sys.exit(main())
