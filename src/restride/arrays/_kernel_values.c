/* What looks at elements one by one: whether they are the same, and what they are rounded. See
 * `_kernel.c` for what all of this is; NumPy's way is in `casts.py` and `_without_kernel.py`.
 */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* Whether two runs have the same bytes. */
EXPORT int32_t restride_same(const uint8_t *a, const uint8_t *b, int64_t nbytes) {
    return memcmp(a, b, (size_t)nbytes) == 0;
}

enum { INFINITE = 0x7f800000 }; /* above it, a float32 without its sign is no number */

static uint16_t bfloat16_of(uint32_t bits) {
    uint32_t quiet = bits >> 16 | 0x7fc0;
    /* Half of the last place, or one bit less where the last bit is even already. */
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > INFINITE ? quiet : rounded);
}

static uint16_t float16_of(uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > INFINITE) return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x1ff));
    if (size >= 0x47800000) return (uint16_t)(sign | 0x7c00); /* 65536 and above */
    if (size >= 0x38800000) { /* 2^-14, the least normal one: the exponent loses 112 */
        uint32_t rounded = size - (112u << 23) + 0xfff + (size >> 13 & 1);
        return (uint16_t)(sign | rounded >> 13);
    }
    if (size <= 0x33000000) return (uint16_t)sign; /* half of the least one, which is a tie to 0 */
    /* What is left of a subnormal one: its digits, shifted to multiples of 2^-24. */
    uint32_t shift = 126 - (size >> 23), digits = (size & 0x7fffff) | 0x800000;
    uint32_t rounded = digits >> shift, rest = digits & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (uint16_t)(sign | (rounded + (rest > half || (rest == half && (rounded & 1)))));
}

/* Round `count` float32 to nearest, ties to even, as bfloat16 or as float16. A NaN stays one, of the
 * same sign. No byte of one side is a byte of the other. */
EXPORT void restride_round(uint8_t *restrict target, const uint8_t *restrict source, int64_t count,
                           int32_t is_bfloat16) {
    uint32_t bits;
    uint16_t rounded;
    if (is_bfloat16)
        for (int64_t at = 0; at < count; at++) {
            memcpy(&bits, source + 4 * at, 4);
            rounded = bfloat16_of(bits);
            memcpy(target + 2 * at, &rounded, 2);
        }
    else
        for (int64_t at = 0; at < count; at++) {
            memcpy(&bits, source + 4 * at, 4);
            rounded = float16_of(bits);
            memcpy(target + 2 * at, &rounded, 2);
        }
}
