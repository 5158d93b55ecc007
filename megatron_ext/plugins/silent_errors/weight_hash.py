"""Hashes the bits of a tensor where the tensor lies: 8 bytes travel, whatever its size.

The bytes are read as 64-bit words w_i. The hash is the sum of mix(w_i) x m_i modulo 2^64: the m_i are odd and
scattered (multiply-shift hashing: Dietzfelbinger et al. 1997, J. Algorithms 25, section 2), and mix lets the upper half
of a word act on the lower, since a product's top bits alone would cancel in pairs. Mixing is one to one and the m_i
are odd, so that no change within one word, such as a flipped bit, leaves the sum as it was. Changes of several words
do so by accident alone.
"""

import torch

_WORDS_AT_ONCE = 1 << 18


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio: its multiples scatter (Knuth, vol. 3, 6.4)


_PART_FACTOR = 0xD1342543DE82EF95 - (1 << 64)  # odd


def weight_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of the tensor's bits, a 64-bit integer [] on its device, without waiting for the device.

    It reads the tensor once and needs 8 MB besides. Tensors of equal shape and bits have equal hashes.
    """
    data = tensor.detach()
    if not data.is_contiguous() or data.storage_offset() * data.element_size() % 8:
        data = data.clone(memory_format=torch.contiguous_format)  # words need a border of 8 bytes
    data = data.view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    parts = list(data[:whole].view(torch.int64).split(_WORDS_AT_ONCE))
    if whole < data.numel():
        parts.append(torch.nn.functional.pad(data[whole:], (0, whole + 8 - data.numel())).view(torch.int64))
    multipliers = torch.arange(max(map(len, parts), default=0), dtype=torch.int64, device=data.device)
    multipliers.mul_(_GOLDEN).bitwise_or_(1)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in parts:
        # Horner's rule over the parts: the factor keeps them in their places.
        mixed = (part >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(part)
        total = total * _PART_FACTOR + mixed.mul_(multipliers[: len(part)]).sum()
    return total
