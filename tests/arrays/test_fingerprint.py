"""Fingerprints: the definition, that parts add up, and that no corruption goes unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.arrays.fingerprint import (
    MODULUS,
    Digester,
    block_weights,
    finish,
    row_weights,
    weight_addresses,
    word_weights,
)
from restride.testing.fingerprints import digest_slowly

pytestmark = pytest.mark.usefixtures("both_ways")

BLOCK = 1 << 18
WORD_WEIGHTS = [12767280, 8544597, 6153258, 7147203]
ROW_WEIGHTS = [[11969513793093448, 15342365235393989], [14485868154185471, 16876128449062112]]
BLOCK_WEIGHT = 135325200620801943538576174083944613559
FINGERPRINT = "2f64d00465b7ba4f13efcf5ef994ba5f"


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def digest(content, start=0):
    return Digester().digest(np.ascontiguousarray(content).view(np.uint8).reshape(-1), start)


@given(nbytes=st.integers(0, 5000), seed=st.integers(0, 99))
def test_a_digest_is_what_the_definition_says(nbytes, seed):
    content = random_bytes(nbytes, seed)

    assert digest(content) == digest_slowly(content.tobytes())


def test_the_definition_holds_over_blocks_and_for_the_largest_numbers():
    content = np.concatenate([np.full(BLOCK, 0xFF, np.uint8), random_bytes(3001)])
    high_bits = np.full(BLOCK // 4, 0x80000000, np.uint32)

    for case in (content, high_bits):
        assert digest(case) == digest_slowly(case.tobytes())


def test_weights_are_those_that_files_of_fingerprints_rely_on():
    # A change of these numbers is a new format: files that were written could not be checked.
    assert [word_weights()[place, 0, 0] for place in range(4)] == WORD_WEIGHTS
    assert row_weights().tolist()[-1][:2] == ROW_WEIGHTS
    assert block_weights(3)[1] == BLOCK_WEIGHT
    assert finish(digest(np.arange(6, dtype=np.float32)), "float32", (2, 3)) == FINGERPRINT


@given(data=st.data())
def test_digests_of_parts_add_up_in_any_order(data):
    nbytes = data.draw(st.integers(1, 3 * BLOCK))
    content = random_bytes(nbytes, nbytes % 7)
    cuts = sorted(data.draw(st.lists(st.integers(0, nbytes), max_size=5)))
    bounds = list(zip([0, *cuts], [*cuts, nbytes], strict=True))
    parts = data.draw(st.permutations(bounds))

    total = sum(digest(content[low:high], low) for low, high in parts) % MODULUS

    assert total == digest(content)


def test_a_digester_forgets_what_it_digested_before():
    digester = Digester()
    content = random_bytes(1001)
    alone = digester.digest(content, 5)

    digester.digest(np.full(2 * BLOCK, 0xFF, np.uint8), 0)

    assert digester.digest(content, 5) == alone


def test_shape_and_dtype_are_part_of_a_fingerprint():
    zeros = digest(np.zeros(24, np.uint8))

    fingerprints = {
        finish(zeros, dtype, shape)
        for dtype, shape in [
            ("float32", (6,)),
            ("int32", (6,)),
            ("float32", (2, 3)),
            ("float32", (3, 2)),
            ("float32", (7,)),
            ("float32", ()),
        ]
    }

    assert len(fingerprints) == 6
    assert all(len(digits) == 32 for digits in fingerprints)


def flip_a_bit(rng, array):
    words = array.reshape(-1).view(np.uint32)
    words[rng.integers(words.size)] ^= np.uint32(1) << np.uint32(rng.integers(32))


def flip_signs(rng, array):
    # All differences are multiples of 2^31, on which sums modulo 2^64 are nearly blind.
    words = array.reshape(-1).view(np.uint32)
    chosen = rng.choice(words.size, rng.integers(1, 9), replace=False)
    words[chosen] ^= np.uint32(1 << 31)


def swap_rows(rng, array):
    one, other = rng.choice(array.shape[0], 2, replace=False)
    array[[one, other]] = array[[other, one]]


def swap_heads(rng, array):
    heads = array.reshape(24, -1, array.shape[1])
    one, other = rng.choice(24, 2, replace=False)
    heads[[one, other]] = heads[[other, one]]


def shift_a_piece(rng, array):
    flat = array.reshape(-1)
    low, high = np.sort(rng.choice(flat.size, 2, replace=False))
    flat[low : high + 1] = np.roll(flat[low : high + 1], rng.integers(1, high - low + 1))


def join_ranks_in_another_order(rng, array):
    parts = np.split(array.copy(), rng.choice([2, 3, 4, 6, 8]), axis=rng.integers(2))
    order = rng.permutation(len(parts))
    while np.array_equal(order, np.arange(len(parts))):
        order = rng.permutation(len(parts))
    array[...] = 0
    axis = next(d for d in (0, 1) if parts[0].shape[d] != array.shape[d])
    array[...] = np.concatenate([parts[place] for place in order], axis=axis)


def exchange_two_elements(rng, array):
    flat = array.reshape(-1)
    one, other = rng.choice(flat.size, 2, replace=False)
    flat[[one, other]] = flat[[other, one]]


def add_one_and_take_one(rng, array):
    # What a plain sum does not see.
    words = array.reshape(-1).view(np.uint32)
    one, other = rng.choice(words.size, 2, replace=False)
    words[one] += np.uint32(1)
    words[other] -= np.uint32(1)


@pytest.mark.parametrize(
    "corrupt",
    [
        flip_a_bit,
        flip_signs,
        swap_rows,
        swap_heads,
        shift_a_piece,
        join_ranks_in_another_order,
        exchange_two_elements,
        add_one_and_take_one,
    ],
)
def test_no_corruption_goes_unnoticed(corrupt):
    rng = np.random.default_rng(7)
    array = rng.standard_normal((96, 48)).astype(np.float32)
    fingerprints = {digest(array)}

    contents = {array.tobytes()}
    for _ in range(1250):
        damaged = array.copy()
        corrupt(rng, damaged)
        contents.add(damaged.tobytes())
        fingerprints.add(digest(damaged))

    # Not only different from the original, but from each other.
    assert len(contents) > 5
    assert len(fingerprints) == len(contents)


def test_the_kernel_is_given_weights_that_lie_where_vectors_begin():
    assert [address % 64 for address in weight_addresses()] == [0, 0]
