"""csrc/algo/attention_plan.h: which keys a row sees, equal shares of work, and the launch on every kind of device."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from cases import mask_words, random_parents
from fastverify.attention.tree_attention import workspace_bytes

HERE = Path(__file__).parent
DEVICES = {"sm_80": (108, 163), "sm_89": (142, 99), "sm_90": (132, 227), "sm_100": (148, 227), "sm_120": (188, 99)}  # SMs, KiB

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the driver")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """run(mode, lines) -> lines of the small program that includes the header."""
    binary = tmp_path_factory.mktemp("plan") / "driver"
    subprocess.run(["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-I", str(HERE.parents[1] / "csrc"),
                    str(HERE / "attention_plan_driver.cpp"), "-o", str(binary)], check=True)

    def run(mode: str, lines: list) -> list:
        done = subprocess.run([str(binary), mode], input="\n".join(lines), capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return run


def seen_positions(words: list, chain: bool, column: int, columns: int, prefix: int, window: int) -> set:
    cells = list(range(prefix)) + [prefix + j for j in range(columns)
                                   if (j <= column if chain else j < 64 * len(words) and words[j // 64] >> (j % 64) & 1)]
    return set(cells[-window:] if window else cells)


def test_visible_positions_equal_a_walk_over_the_cells(driver, rng):
    pick = random.Random(3)
    lines, wanted = [], []
    for i in range(600):
        columns, prefix = pick.choice([1, 5, 63, 64, 65, 130]), pick.choice([0, 1, 63, 64, 100, 1000])
        row = pick.randrange(columns)
        parents = random_parents(columns, rng, forest=i % 3 == 0)
        words = [w % 2**64 for w in mask_words(parents, -(-columns // 64) + i % 2)[row].tolist()]
        if columns % 64:  # bits that mean no column
            words[(columns - 1) // 64] |= pick.getrandbits(64) >> (columns % 64) << (columns % 64)
        if i % 11 == 0:
            words = [0] * len(words)
        chain, window = i % 4 == 0, pick.choice([0, 0, 1, 3, 40, 70, 2000])
        start = pick.randrange(0, prefix + columns)
        lines.append(f"{chain:d} {row} {columns} {prefix} {window} {start} 256 {len(words)} {' '.join(map(str, words))}")
        seen = seen_positions(words, chain, row, columns, prefix, window)
        wanted.append("".join("01"[start + j in seen] for j in range(256)))
    assert driver("visible", lines) == wanted


def test_every_position_of_the_line_belongs_to_one_piece_and_slots_do_not_collide(driver):
    pick, lines = random.Random(5), []
    for _ in range(400):
        count = pick.choice([1, 2, 7, 64, 300])
        lengths = [pick.choice([1, 2, 17, 129, 1025]) for _ in range(count)]
        lines.append(f"{pick.choice([1, 2, 132, 264, 1024])} {pick.choice([1, 4])} {count} {' '.join(map(str, lengths))}")
    assert set(driver("pieces", lines)) == {"1"}


def test_sequences_of_equal_length_get_whole_clusters(driver):
    """Any mix of lengths: either every sequence has as many whole clusters and every unit one block, or none has."""
    pick, lines = random.Random(6), []
    for _ in range(600):
        count, near = pick.choice([1, 2, 7, 64, 300]), pick.choice([1, 9, 129, 1025])
        lengths = [max(1, near + pick.choice([0, 0, -1, 1, -near])) for _ in range(count)]
        lines.append(f"{pick.choice([1, 2, 66, 132, 264, 396])} {pick.choice([1, 3, 8])} {pick.choice([1, 2])} {count} {' '.join(map(str, lengths))}")
    out = driver("cut", lines)
    assert {line.split()[2] for line in out} == {"1"} and len({line.split()[0] for line in out}) > 4

    def shape(blocks, heads, units, count=1):
        return f"{blocks} {heads} 1 {count} " + " ".join([str(units)] * count)

    # one cluster alone, four per sequence, one for each of 64 sequences, none for 256, three times two fit 396 blocks best as six
    known = [shape(264, 8, 17), shape(264, 8, 129), shape(264, 8, 129, 8), shape(264, 8, 33, 32), shape(396, 8, 129, 8), shape(132, 1, 513, 4)]
    assert [line.split()[:2] for line in driver("cut", known)] == [["8", "8"], ["8", "32"], ["4", "4"], ["1", "0"], ["6", "6"], ["8", "32"]]


def test_only_short_page_tables_get_clusters(driver):
    """(batch, positions of a page table, major): tree_attention, mla_tree_attention."""
    cases = {(1, 1088, 9): "1 1", (1, 2048, 12): "1 1", (1, 2049, 9): "1 0", (1, 4096, 9): "1 0", (1, 4097, 9): "0 0", (2, 1024, 10): "1 1",
             (2, 2048, 9): "1 0", (2, 2064, 9): "0 0", (3, 682, 9): "1 1", (3, 683, 9): "0 0", (32, 2064, 9): "0 0", (1, 1088, 8): "0 0",
             (1 << 20, 1 << 31, 9): "0 0"}
    assert driver("clusters", [" ".join(map(str, c)) for c in cases]) == list(cases.values())


def test_only_few_rows_of_a_kv_head_go_to_one_block(driver):
    cases = {(8, 1, 4): 1, (11, 1, 3): 0, (10, 1, 3): 1, (33, 1, 1): 0, (32, 4, 4): 1, (33, 4, 4): 0, (0, 0, 4): 0}
    assert driver("block", [" ".join(map(str, c)) for c in cases]) == [str(v) for v in cases.values()]


@pytest.mark.parametrize("device", DEVICES)
def test_launches_fit_the_device(driver, device):
    sms, kib = DEVICES[device]
    cases = [(rows, batch, heads, group, dim, item) for rows in (1, 5, 64, 128, 1024, 65536) for batch in (1, 8, 64, 1025)
             for heads in (1, 8) for group in (1, 4, 5, 16) for dim in (64, 128, 256) for item in (1, 2)]
    cases = [(*c, sm90) for c in cases for sm90 in ((0, 1) if device == "sm_90" else (0,))]
    out = driver("launch", [" ".join(map(str, (*c[:6], sms, kib * 1024, c[6]))) for c in cases])
    for (rows, batch, heads, group, dim, item, sm90), line in zip(cases, out, strict=True):
        tile, stages, blocks, wgmma, smem, workspace = map(int, line.split())
        assert tile in ((32, 64) if dim == 256 else (16, 32, 64, 128)) and 2 <= stages <= 6
        assert smem <= kib * 1024 and (blocks // sms) * (smem + 1024) <= (kib + 1) * 1024
        assert blocks in (sms, 2 * sms, 3 * sms) and blocks <= 1020
        ring = smem - tile * dim * 2
        warp_rows = 16 if dim == 256 or tile == 16 else 32
        assert wgmma <= sm90 and (not wgmma or dim == 128 and tile in (64, 128))
        assert wgmma or ring >= 4 * warp_rows * dim * 4  # what a block's own merge needs
        assert workspace <= workspace_bytes(rows, batch, heads * group, heads, dim, sms)


def test_launch_of_known_shapes(driver):
    """The tuned shape: two blocks of three 32 KiB stages per multiprocessor of an H200, one row tile for 16 nodes x 4 heads."""
    h200 = f"132 {227 * 1024}"
    out = driver("launch", [f"16 1 8 4 128 2 {h200} 0", f"16 1 8 4 128 2 {h200} 1", f"64 1 8 4 128 2 {h200} 1", f"256 32 8 4 128 2 {h200} 1",
                            f"128 8 8 4 128 2 188 {99 * 1024} 0"])
    assert [line.split()[:4] for line in out] == [["64", "3", "264", "0"], ["64", "3", "264", "1"], ["128", "3", "132", "1"],
                                                  ["32", "3", "264", "0"], ["64", "2", "188", "0"]]


@pytest.mark.parametrize("device", DEVICES)
def test_latent_launches_fit_the_device(driver, device):
    sms, kib = DEVICES[device]
    cases = [(rows, batch, heads, capacity, sms, kib * 1024, sm90) for rows in (1, 8, 64, 1024) for batch in (1, 4, 1025) for heads in (1, 8, 16, 128)
             for capacity in (64, 8256, 1 << 20) for sm90 in ((0, 1) if device == "sm_90" else (0,))]
    for case, line in zip(cases, driver("mla", [" ".join(map(str, c)) for c in cases]), strict=True):
        wgmma, tile, tokens, stages, blocks, smem = map(int, line.split())
        assert wgmma == case[-1] and (tile, tokens) in ({(64, 64)} if wgmma else {(64, 32), (32, 16)})
        assert 2 <= stages <= 6 and blocks == sms and smem <= kib * 1024


def test_latent_tiles_by_shared_memory(driver):
    """64 rows with Q in shared memory on an sm_100; with less, in registers, but for few rows of short sequences."""
    shapes = [(8, 1, 8, 8256), (32, 4, 8, 32832), (9, 1, 8, 8256), (4, 1, 8, 8256)]
    for (sms, kib), wanted in {(148, 227): "64 32,64 32,64 32,32 16", (108, 163): "32 16,64 32,64 32,32 16", (188, 99): "32 16,64 32,64 32,32 16"}.items():
        out = driver("mla", [f"{' '.join(map(str, s))} {sms} {kib * 1024} 0" for s in shapes])
        assert ",".join(" ".join(line.split()[1:3]) for line in out) == wanted
