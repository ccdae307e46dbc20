import torch

from rollout.random_numbers import combine, derive_seed, uniform


def int64(*numbers: int) -> torch.Tensor:
    """Unsigned 64-bit numbers as the int64 tensor of the same bits."""
    return torch.tensor([number - 2**64 if number >= 2**63 else number for number in numbers])


def test_hash_of_key_zero_is_the_published_splitmix64_stream():
    # The first five outputs of the reference implementation (prng.di.unimi.it/splitmix64.c) for the seed 0.
    stream = int64(0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B)
    assert torch.equal(combine(torch.tensor(0), torch.arange(5)), stream)


def test_hashes_of_a_grid_of_keys_and_numbers_are_all_different():
    keys, numbers = torch.arange(-50, 50), torch.arange(-50, 50)
    assert len(combine(keys[:, None], numbers[None]).unique()) == 100 * 100


def test_one_bit_of_key_or_number_flips_half_of_the_hash():
    keys = torch.arange(1000)
    for changed in (combine(keys ^ 1, keys), combine(keys, keys ^ 1), combine(keys ^ 2**40, keys)):
        flipped = combine(keys, keys) ^ changed
        bits = sum(int(((flipped >> place) & 1).sum()) for place in range(64))
        # 64,000 coin flips: 32,000 expected, standard deviation sqrt(16,000) = 126.
        assert abs(bits - 32_000) < 5 * 126


def test_derived_seeds_depend_on_every_part_and_on_their_order():
    parts = [(0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**63,), (2**64 + 2,)]
    assert len({derive_seed(*part) for part in parts}) == len(parts)
    assert derive_seed(5, 7) == derive_seed(5, 7)
    assert derive_seed(-1) == derive_seed(2**64 - 1)  # a seed is its last 64 bits
    assert all(-(2**63) <= derive_seed(*part) < 2**63 for part in parts)


def test_uniform_numbers_never_reach_zero_or_one():
    lowest, highest = uniform(int64(0, 2**64 - 1)).tolist()
    assert (lowest, highest) == (2.0**-53, 1 - 2.0**-53)


def test_uniform_numbers_are_spread_evenly():
    numbers = uniform(combine(torch.tensor(1), torch.arange(100_000)))
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    # Chi-square of 100 cells of 1,000: 99 expected, standard deviation sqrt(2 * 99) = 14.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 99 + 5 * 14
    # Neighbours in the stream are uncorrelated: a mean of products with standard deviation 1 / 12 / sqrt(100,000).
    products = (numbers[1:] - 0.5) * (numbers[:-1] - 0.5)
    assert abs(float(products.mean())) < 5 / 12 / 100_000**0.5
