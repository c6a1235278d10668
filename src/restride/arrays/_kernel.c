/* The loops over bytes that NumPy is slow at: digests here, strided copies in `_kernel_copy.c`,
 * both among reads and writes in `_kernel_program.c`, and what looks at elements in
 * `_kernel_values.c`.
 *
 * Plain C11 with the vector types of GCC and Clang. It knows nothing of Python: `_kernel.py` loads it
 * with ctypes, proves what is said of pointers and sizes here, and has NumPy do the same work where
 * this was not built. What it computes is defined in `fingerprint.py`; every result is exact, so the
 * order of sums and the width of vectors change the time and nothing else.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they are in memory, and are little-endian"
#endif
#if !defined(__SIZEOF_INT128__)
#error "needs 128-bit integers"
#endif
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__)
#error "a library built so would flush denormals in the whole process that loads it"
#endif

#define EXPORT __attribute__((visibility("default")))

/* What the functions below expect and return. `_kernel.py` takes no library with another number. */
EXPORT int32_t restride_abi(void) { return 8; }

/* ---- Digests ---------------------------------------------------------------------------------- */

enum {
    WORDS = 256, /* of a row */
    PAIRS = WORDS / 2,
    ROWS = 256, /* of a block */
    SUMS = 4,   /* of a row */
    TOTALS = 2, /* of a block */
    ROW_NBYTES = 4 * WORDS,
    BLOCK_NBYTES = ROWS * ROW_NBYTES,
};

typedef unsigned __int128 u128;

/* Some bytes of a block, and where in it they start. */
typedef struct {
    const uint8_t *bytes;
    int64_t start;
    int64_t stop;
} part_t;

/* One row of a block, in which bytes that are not given are zero. */
static const uint8_t *whole_row(const part_t *part, int64_t row, uint8_t edge[ROW_NBYTES]) {
    int64_t first = row * ROW_NBYTES, last = first + ROW_NBYTES;
    if (first >= part->start && last <= part->stop) return part->bytes + (first - part->start);
    int64_t low = first > part->start ? first : part->start;
    int64_t high = last < part->stop ? last : part->stop;
    memset(edge, 0, ROW_NBYTES);
    if (low < high) memcpy(edge + (low - first), part->bytes + (low - part->start), high - low);
    return edge;
}

/* One function for each width of vectors: a level. Level 0 runs everywhere. MULTIPLY is the product of
 * the lower 32 bits of each lane, which compilers do not find where it is written as a product. */
#define LEVEL(name) name##_0
#define TARGET
#define LANES 2
#if defined(__x86_64__)
#define MULTIPLY(a, b) ((vector)_mm_mul_epu32((__m128i)(a), (__m128i)(b)))
#elif defined(__aarch64__)
#define MULTIPLY(a, b) \
    ((vector)vmull_u32(vmovn_u64((uint64x2_t)(a)), vmovn_u64((uint64x2_t)(b))))
#else
#define MULTIPLY(a, b) (((a) & UINT32_MAX) * ((b) & UINT32_MAX))
#endif
#include "_kernel_sums.h"

#if defined(__x86_64__)
#define LEVEL(name) name##_1
#define TARGET __attribute__((target("avx2")))
#define LANES 4
#define MULTIPLY(a, b) ((vector)_mm256_mul_epu32((__m256i)(a), (__m256i)(b)))
#include "_kernel_sums.h"

#define LEVEL(name) name##_2
#define TARGET __attribute__((target("avx512f")))
#define LANES 8
#define MULTIPLY(a, b) ((vector)_mm512_mul_epu32((__m512i)(a), (__m512i)(b)))
#include "_kernel_sums.h"
#endif

/* The highest level that this machine can run. */
EXPORT int32_t restride_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 2;
    if (__builtin_cpu_supports("avx2")) return 1;
#endif
    return 0;
}

static void sum_block(int32_t level, const part_t *part, const uint64_t *words,
                      const uint64_t *rows, u128 totals[TOTALS]) {
#if defined(__x86_64__)
    if (level == 2) {
        sum_block_2(part, words, rows, totals);
        return;
    }
    if (level == 1) {
        sum_block_1(part, words, rows, totals);
        return;
    }
#endif
    (void)level;
    sum_block_0(part, words, rows, totals);
}

/* Arithmetic modulo 2^127 - 1, in which 2^127 is 1. */
#define MODULUS ((((u128)1) << 127) - 1)

static u128 reduced(u128 x) {
    x = (x & MODULUS) + (x >> 127);
    return x >= MODULUS ? x - MODULUS : x;
}

/* x * 2^64 for x below the modulus. */
static u128 shifted(u128 x) { return reduced(x >> 63 | x << 65 >> 1); }

static u128 times_half(u128 x, uint64_t y) {
    u128 low = (u128)(uint64_t)x * y;
    u128 high = (u128)(uint64_t)(x >> 64) * y; /* below 2^127, and counts 2^64 fold */
    return reduced(reduced(low) + shifted(high));
}

/* x * y for both below the modulus. */
static u128 times(u128 x, u128 y) {
    return reduced(times_half(x, (uint64_t)y) + shifted(times_half(x, (uint64_t)(y >> 64))));
}

/* Digest a run of an array's bytes.
 *
 * bytes, nbytes   the run, at least one byte, at any address
 * start           where it starts in its first block, below BLOCK_NBYTES
 * blocks          16 * TOTALS bytes for each block that the run touches: the weights of its totals
 * words           [SUMS][2][PAIRS] weights below 2^24: those of the even words of a row, of the odd ones
 * rows            [ROWS][SUMS][TOTALS] weights below 2^54; as `words` at multiples of 64
 * total           receives the two halves of a number modulo 2^127 - 1, the lower one first
 */
EXPORT void restride_digest(int32_t level, const uint8_t *bytes, int64_t nbytes, int64_t start,
                            const uint8_t *blocks, const uint64_t *words, const uint64_t *rows,
                            uint64_t *total) {
    u128 sum = 0;
    while (nbytes > 0) {
        int64_t room = BLOCK_NBYTES - start;
        int64_t given = nbytes < room ? nbytes : room;
        part_t part = {bytes, start, start + given};
        u128 totals[TOTALS];
        sum_block(level, &part, words, rows, totals);
        for (int place = 0; place < TOTALS; place++) {
            u128 weight;
            memcpy(&weight, blocks + 16 * place, 16);
            sum = reduced(sum + times(reduced(weight), reduced(totals[place])));
        }
        bytes += given;
        nbytes -= given;
        blocks += 16 * TOTALS;
        start = 0;
    }
    total[0] = (uint64_t)sum;
    total[1] = (uint64_t)(sum >> 64);
}
