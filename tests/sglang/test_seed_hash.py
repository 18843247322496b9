"""The hash that draws a token by a request's seed, against MurmurHash3 written from its definition, byte by byte."""

import struct

import torch

from enginehouse_sglang.on_cpu import sgl_kernel

SEEDS = [0, 1, 7, 2**31 - 1, 2**32 + 5, 2**63 - 1]
POSITIONS = [0, 1, 17, 4095, 2**31 - 1, 3]


def murmur3(data: bytes) -> int:
    """MurmurHash3 for x86, 32 bits, of a number of bytes that four divides, with seed 0."""

    def rotated(word: int, bits: int) -> int:
        return ((word << bits) | (word >> (32 - bits))) % 2**32

    hashed = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = rotated(word * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        hashed = (rotated(hashed ^ word, 13) * 5 + 0xE6546B64) % 2**32
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B % 2**32
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 % 2**32
    return hashed ^ hashed >> 16


def test_the_reference_gives_a_published_value():
    assert murmur3(b"test") == 0xBA6BD213


def test_the_hash_is_murmurhash3_of_seed_position_and_token():
    found = sgl_kernel.murmur_hash32_cpu(torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.arange(5))
    assert found.dtype == torch.uint32
    expected = [[murmur3(struct.pack("<qII", *row, token)) for token in range(5)] for row in zip(SEEDS, POSITIONS)]
    assert found.tolist() == expected


def test_seeds_of_unsigned_integers_hash_as_their_bits():
    seeds, positions, tokens = torch.tensor([5, -1]), torch.tensor([1, 2]), torch.arange(3)
    signed = sgl_kernel.murmur_hash32_cpu(seeds, positions, tokens)
    assert sgl_kernel.murmur_hash32_cpu(seeds.view(torch.uint64), positions, tokens).tolist() == signed.tolist()
