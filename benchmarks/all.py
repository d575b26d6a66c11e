"""Run all benchmarks in turn and render their results. Run: python benchmarks/all.py [--quick] [--data DIR] [NAME ...].

Each result is the JSON line that a benchmark prints last, kept in results.jsonl with the command, the machine and the
commit of the code; the table of RESULTS.md is rendered from that file, and growth.svg drawn. Only full runs on a quiet
machine are kept: where other processes use the same processors, results are shown and not recorded. Of --quick only the
time is kept, in quick.json. `make bench` runs this; `--stale` lists records that today's code would make otherwise.
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
from checks import missing, targets

HERE = Path(__file__).resolve().parent
NAMES = (
    "decode", "constraint", "ground", "finetune", "quantize", "embed", "parquet", "pipeline", "startup", "growth",
)  # fmt: skip
RECORDS, PAGE, PLOT = HERE / "results.jsonl", HERE / "RESULTS.md", HERE / "growth.svg"
QUICK = HERE / "quick.json"  # seconds of each benchmark's --quick
OURS = ("benchmarks/results.jsonl", "benchmarks/RESULTS.md", "benchmarks/growth.svg", "benchmarks/quick.json")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
BUSY = 0.1  # of the time of the processors at hand, used by others: from there on nothing is recorded


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="the small sizes, under a minute each; only their time is recorded"
    )
    parser.add_argument("--data", metavar="FOLDER", help="finetune: compare on the data there, too")
    parser.add_argument("--stages", metavar="A,B", help="growth: measure these, keep what is recorded of the others")
    parser.add_argument("--stale", action="store_true", help="run nothing: list the records to measure again, and why")
    parser.add_argument("--render", action="store_true", help="run nothing: write the page from what is recorded")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}; all when none is given")
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; they are {', '.join(NAMES)}")
    records = {record["name"]: record for record in read_records()}
    if args.stale:
        for name in args.names or NAMES:
            for reason in stale(records[name]) if name in records else ["not recorded"]:
                print(f"{name}: {reason}")
        return 0
    if args.render:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_records()), encoding="utf-8")
        return 0
    failed = []
    for name in args.names or NAMES:
        busy, code = used_by_others(), commit()
        options = ["--quick"] * args.quick + ["--json"]
        if args.data and name == "finetune":
            options += ["--data", args.data]
        if args.stages and name == "growth":
            options += ["--stages", args.stages]
        command = [f"benchmarks/{name}.py", *options]
        print(f"\n== python {' '.join(command)}", flush=True)
        started = time.monotonic()
        done = subprocess.run([sys.executable, *command], cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
        took = time.monotonic() - started
        print(done.stdout, flush=True)
        if done.returncode:
            failed.append(name)
            continue
        record = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {took:.0f} s")
        busy = max(busy, used_by_others())
        if busy > BUSY:
            print(f"{name}: not recorded (other processes use {busy:.0%} of the processors)")
            continue
        if args.quick:
            times = {**read_quick(), name: round(took)}
            QUICK.write_text(json.dumps({n: times[n] for n in NAMES if n in times}) + "\n", encoding="utf-8")
            print(f"{name}: of the quick form only the time is recorded")
        else:
            record["commit"] = code
            if "sizes" in record:
                record = growth.joined(records.get(name), record)
                growth.draw(record["sizes"], PLOT)
            shown = " ".join("BEAUTY" if part == args.data else part for part in command)
            records[name] = record | {"command": f"python {shown}", "machine": machine()}
            if "--stages" in command:  # the record is of all parts, the time of one
                records[name]["command"] = f"python benchmarks/{name}.py --json, in parts"
            else:
                records[name]["minutes"] = round(took / 60, 1)
            RECORDS.write_text("".join(json.dumps(records[n]) + "\n" for n in NAMES if n in records), encoding="utf-8")
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_records()), encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def read_records() -> list[dict[str, Any]]:
    """The recorded results, in the order of NAMES."""
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.exists() else []
    return [json.loads(line) for line in lines]


def read_quick() -> dict[str, int]:
    """Seconds of the quick forms that are recorded."""
    return json.loads(QUICK.read_text(encoding="utf-8")) if QUICK.exists() else {}


def stale(record: dict[str, Any]) -> list[str]:
    """Why a record is not what today's code would write; empty where it is."""
    reasons = []
    if lacking := missing(record["name"], record["equal"]):
        reasons.append(f"before the check of {', '.join(lacking)}")
    if "commit" not in record:
        reasons.append("before commits were recorded")
    return reasons


def commit() -> str:
    """The short name of the code's commit, with a + where files were changed since; what this writes does not count."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=HERE.parent, text=True).strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{name}" for name in OURS))
        return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # not a checkout of git


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
    """Markdown: one line a ratio, one line an equality with a goal, and each benchmark's checks, roof and command."""
    absent = [name for name in NAMES if name not in {record["name"] for record in records}]
    lines = []
    if records:
        lines += ["| benchmark | against | times faster | goal | reached |", "|---|---|---|---|---|"]
    for record in records:
        for peer, (ratio, goal) in record["ratios"].items():
            lines.append(f"| {record['name']} | {peer} | {ratio:.4g} | {goal:g} | {'yes' if ratio >= goal else 'no'} |")
    aimed = [
        (record["name"], *found) for record in records for found in targets(record["name"], record["equal"]).items()
    ]
    if aimed:
        lines += ["", "| benchmark | equality | value | goal | reached |", "|---|---|---|---|---|"]
    for name, what, (value, goal) in aimed:
        lines.append(f"| {name} | {what} | {value:.4g} | {goal:g} | {'yes' if value >= goal else 'no'} |")
    lines += [""] if records else []
    for record in records:
        facts = [
            ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record[part].items())
            for part in ("equal", "roof")
        ]
        took = f", {record['minutes']:g} minutes" if "minutes" in record else ""
        of = f", commit {record['commit']}" if "commit" in record else ""
        old = "".join(f" **{reason[0].upper()}{reason[1:]}.**" for reason in stale(record))
        lines.append(
            f"- **{record['name']}** ({record['about']}): `{record['command']}` on {record['machine']},"
            f" threads: {record['threads']}{took}{of}.{old} Equal: {facts[0]}. Roof: {facts[1]}."
        )
    if any("sizes" in record for record in records):
        lines.append(f"\n![Time and peak memory against items, with the exponents of growth]({PLOT.name})")
    if quick := read_quick():
        lines.append(f"\nSeconds with `--quick`: {', '.join(f'{name} {took}' for name, took in quick.items())}.")
    if absent:
        lines.append(f"\nNot measured on a quiet machine yet: {', '.join(absent)}.")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    sys.exit(main())
