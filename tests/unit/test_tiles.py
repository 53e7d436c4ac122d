from __future__ import annotations

import torch

from longcat_pd.models.batch import ForwardInputs, Rows
from longcat_pd.models.tiles import Cost, Tile, tiles

BLOCK = 4


def batch(lengths: list[int], kv_lens: list[int], *, columns: int = 10, stride: int = 1) -> ForwardInputs:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    rows = torch.arange(offsets[-1])
    tables = torch.arange(len(lengths) * columns).view(len(lengths), columns)
    return ForwardInputs(
        token_ids=rows,
        positions=rows,
        row_seqs=rows,
        slot_mapping=rows,
        ngram_windows=None,
        cu_seqlens_q=tuple(offsets),
        kv_lens=tuple(kv_lens),
        block_tables=tables,
        block_starts=tables * 100,
        table_stride=stride,
        gather_blocks=None,
        output_rows=rows,
        rows=Rows.even(len(rows), 1),
        outputs=Rows.even(len(rows), 1),
    )


def cut(inputs: ForwardInputs, *, row: int = 0, key: int = 0, pair: int = 1, at_most: int = 1 << 20) -> list[Tile]:
    return list(tiles(inputs, BLOCK, Cost(row, key, pair), at_most=at_most))


def shapes(found: list[Tile]) -> list[tuple[int, int, int, int]]:
    return [(tile.rows.start, tile.rows.stop, tile.rows_each, tile.block_tables.shape[1]) for tile in found]


def test_rows_of_a_decode_step_are_one_tile() -> None:
    inputs = batch([1, 1, 1], [5, 13, 2])
    (tile,) = cut(inputs)
    assert shapes([tile]) == [(0, 3, 1, 4)]  # 13 tokens lie in four blocks
    assert torch.equal(tile.block_tables, inputs.block_tables[:, :4])
    assert torch.equal(tile.block_starts, inputs.block_starts[:, :4])
    assert tile.cut(inputs.positions).tolist() == [[0], [1], [2]]


def test_equal_lengths_go_together_and_empty_sequences_are_left_out() -> None:
    inputs = batch([3, 3, 0, 0, 2, 0, 1, 1], [3, 9, 40, 40, 2, 40, 40, 1])
    assert shapes(cut(inputs)) == [(0, 6, 3, 3), (6, 8, 2, 1), (8, 10, 1, 10)]
    assert torch.equal(cut(inputs)[1].block_tables, inputs.block_tables[4:5, :1])
    assert cut(inputs)[0].cut(inputs.positions).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_no_rows_no_tiles() -> None:
    assert cut(batch([0, 0], [7, 8])) == []


def test_a_partitioned_table_needs_a_column_for_each_round_of_blocks() -> None:
    assert shapes(cut(batch([1], [25], stride=3))) == [(0, 1, 1, 3)]  # 7 blocks, 3 rounds


def test_no_more_columns_than_the_table_has() -> None:
    assert shapes(cut(batch([1], [4000]))) == [(0, 1, 1, 10)]


def test_what_is_too_large_is_cut_between_sequences_then_between_rows() -> None:
    inputs = batch([5, 5], [8, 40])  # a row of the first costs 8 keys, of the second 40
    assert shapes(cut(inputs, at_most=100)) == [(0, 5, 5, 2), (5, 7, 2, 10), (7, 9, 2, 10), (9, 10, 1, 10)]
    # 40 for the keys, 40 for each row
    assert shapes(cut(inputs, key=1, at_most=100))[1:] == [(i, i + 1, 1, 10) for i in range(5, 10)]
    assert [tile.rows for tile in cut(inputs, row=1000, at_most=100)] == [slice(i, i + 1) for i in range(10)]
    assert [tile.rows for tile in cut(inputs, key=1000, at_most=100)] == [slice(i, i + 1) for i in range(10)]
