from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from air_hpc.data.batches import Batches, BatchShape
from air_hpc.data.corpus import corpus_folder, ensure_corpus, standard_library_sources
from air_hpc.data.shards import INDEX_NAME, TokenStream, read_index, write_shards
from air_hpc.errors import BadInput, EnvironmentFailure


def stream_of(folder: Path, data: bytes, shard_tokens: int = 7) -> TokenStream:
    index = write_shards(
        folder, [data[:5], data[5:]], dtype="uint8", vocab_size=256, shard_tokens=shard_tokens
    )
    return TokenStream(folder, index)


def test_windows_cross_shards(tmp_path: Path) -> None:
    data = bytes(range(40))
    stream = stream_of(tmp_path / "set", data)
    for start in range(0, 30, 3):
        assert stream.read(start, 10).tolist() == list(data[start : start + 10])


def test_two_byte_tokens(tmp_path: Path) -> None:
    tokens = np.arange(1000, 1050, dtype="<u2")
    index = write_shards(
        tmp_path / "set", [tokens.tobytes()], dtype="uint16", vocab_size=2000, shard_tokens=20
    )
    assert len(index.shards) == 3
    assert TokenStream(tmp_path / "set", index).read(15, 20).tolist() == tokens[15:35].tolist()


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    digests = []
    for name, data in [("a", b"x" * 50), ("b", b"x" * 50), ("c", b"y" + b"x" * 49)]:
        index = write_shards(tmp_path / name, [data], dtype="uint8", vocab_size=256)
        digests.append(index.digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_set_that_is_there_is_kept_and_nothing_is_left_aside(tmp_path: Path) -> None:
    first = write_shards(tmp_path / "set", [b"first"], dtype="uint8", vocab_size=256)
    second = write_shards(tmp_path / "set", [b"second"], dtype="uint8", vocab_size=256)
    assert second == first
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_broken_set_is_built_again(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_shards(folder, [b"first"], dtype="uint8", vocab_size=256)
    (folder / INDEX_NAME).write_text("{")
    assert read_index(folder) is None
    index = write_shards(folder, [b"second"], dtype="uint8", vocab_size=256)
    assert index.tokens == 6
    assert read_index(folder) == index


def test_a_short_shard_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    index = write_shards(folder, [b"0123456789"], dtype="uint8", vocab_size=256)
    (folder / "shard-00000.bin").write_bytes(b"012")
    with pytest.raises(EnvironmentFailure, match=r"has 3 tokens, its index says 10.*shard-00000"):
        TokenStream(folder, index)


def test_an_unwritable_cache_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFailure, match=r"data\.cache_dir"):
        write_shards(tmp_path / "file" / "set", [b"x"], dtype="uint8", vocab_size=256)


def make_library(root: Path) -> None:
    for name in ["b.py", "a.py", "pkg/__init__.py", "pkg/test/t.py", "site-packages/x.py", "n.txt"]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_the_corpus_takes_sources_in_sorted_order_without_tests(tmp_path: Path) -> None:
    make_library(tmp_path / "lib")
    sources = standard_library_sources(tmp_path / "lib")
    assert [s.relative_to(tmp_path / "lib").as_posix() for s in sources] == [
        "a.py",
        "b.py",
        "pkg/__init__.py",
    ]
    folder, index = ensure_corpus(tmp_path / "cache", tmp_path / "lib")
    text = bytes(TokenStream(folder, index).read(0, index.tokens).astype(np.uint8))
    assert text == b"a.py\0b.py\0pkg/__init__.py\0"


def test_the_corpus_is_built_once(tmp_path: Path) -> None:
    make_library(tmp_path / "lib")
    folder, index = ensure_corpus(tmp_path / "cache", tmp_path / "lib")
    (tmp_path / "lib" / "new.py").write_text("later")
    assert ensure_corpus(tmp_path / "cache", tmp_path / "lib") == (folder, index)


def test_another_interpreter_has_another_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = corpus_folder(tmp_path)
    monkeypatch.setattr(sys, "version", sys.version.replace("(", "(other "))
    assert corpus_folder(tmp_path) != ours


def test_targets_are_inputs_shifted_and_every_token_is_a_target_once(tmp_path: Path) -> None:
    data = bytes(range(33))
    stream = stream_of(tmp_path / "set", data)
    batches = Batches(stream, BatchShape(4, 8, 2, 0, 1), seed=0)
    batch = batches.step_batch(0)
    assert batch.shape == (2, 4, 5)
    targets = sorted(batch[..., 1:].ravel().tolist())
    assert targets == list(range(1, 33))
    assert batches.epoch_at(1) == 1.0


def test_ranks_share_a_batch_without_overlap(tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "set", bytes(200), shard_tokens=64)
    whole = Batches(stream, BatchShape(4, 8, 1, 0, 1), 0).order.samples_at(np.arange(8, 16))
    parts = []
    for rank in range(4):
        batches = Batches(stream, BatchShape(4, 8, 2, rank, 4), 0)
        assert batches.step_batch(1).shape == (2, 1, 5)
        parts.append(batches.order.samples_at(np.arange(8 + 2 * rank, 10 + 2 * rank)))
    assert np.array_equal(np.concatenate(parts), whole)


def test_data_shorter_than_a_sequence_is_bad_input(tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "set", b"abc")
    with pytest.raises(BadInput, match=r"data\.sequence_length=4: the data has only 3 tokens"):
        Batches(stream, BatchShape(4, 1, 1, 0, 1), 0)
