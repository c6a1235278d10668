/* The loops over bytes that NumPy is slow at: digests here, strided copies in `_kernel_copy.c`,
 * both among reads and writes in `_kernel_program.c`, and what looks at elements in
 * `_kernel_values.c`.
 *
 * Plain C11 with the vector types of GCC and Clang. It knows nothing of Python: `_kernel.py` loads it
 * with ctypes, proves what is said of pointers and sizes here, and has NumPy do the same work where
 * this was not built. What it computes is defined in `fingerprint.py`; every result is exact, so the
 * order of sums and the width of vectors change the time and nothing else. Build without fast-math.
 */
#include <float.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they are in memory, and are little-endian"
#endif
#if !defined(__SIZEOF_INT128__) || FLT_EVAL_METHOD != 0
#error "needs 128-bit integers, and doubles that are rounded to doubles"
#endif

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__)
#error "sums are exact in the order that is written here; built so, it would also flush denormals"
#endif

#define EXPORT __attribute__((visibility("default")))

/* What the functions below expect and return. `_kernel.py` takes no library with another number. */
EXPORT int32_t restride_abi(void) { return 7; }

/* ---- Digests ---------------------------------------------------------------------------------- */

enum {
    WORDS = 256, /* of a row */
    ROWS = 256,  /* of a block */
    SUMS = 8,
    ROW_NBYTES = 4 * WORDS,
    BLOCK_NBYTES = ROWS * ROW_NBYTES,
    CHUNK = 64, /* words of a row that are made doubles at one time: they stay in the first cache */
};

/* Adding and subtracting this rounds a double below 2^53 to a multiple of 2^27. */
#define SPLITTER 0x1.8p+79
#define LIMB 0x1p+27

/* The 8 sums of a block: `high` holds multiples of 2^27, `low` what is left. */
typedef struct {
    double high[SUMS];
    double low[SUMS];
} sums_t;

typedef struct {
    const double *words; /* [WORDS][SUMS] */
    const double *rows;  /* [ROWS][SUMS][SUMS] */
} weights_t;

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

/* One function for each width of vectors: a level. Level 0 runs everywhere. */
#define LEVEL(name) name##_0
#define TARGET
#define LANES 2
#define TILE 2
#include "_kernel_sums.h"

#if defined(__x86_64__)
#define LEVEL(name) name##_1
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 4
#define TILE 4
#include "_kernel_sums.h"

#define LEVEL(name) name##_2
#define TARGET __attribute__((target("avx512f")))
#define LANES 8
#define TILE 8
#include "_kernel_sums.h"
#endif

/* The highest level that this machine can run. */
EXPORT int32_t restride_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

static void sum_block(int32_t level, const part_t *part, weights_t weights, sums_t *sums) {
#if defined(__x86_64__)
    if (level == 2) {
        sum_block_2(part, weights, sums);
        return;
    }
    if (level == 1) {
        sum_block_1(part, weights, sums);
        return;
    }
#endif
    (void)level;
    sum_block_0(part, weights, sums);
}

/* Arithmetic modulo 2^127 - 1, in which 2^127 is 1. */
typedef unsigned __int128 u128;
#define MODULUS ((((u128)1) << 127) - 1)

static u128 reduced(u128 x) {
    x = (x & MODULUS) + (x >> 127);
    return x >= MODULUS ? x - MODULUS : x;
}

/* x * y for x below the modulus. */
static u128 times(u128 x, uint64_t y) {
    u128 low = (u128)(uint64_t)x * y;
    u128 high = (u128)(uint64_t)(x >> 64) * y; /* below 2^127, and counts 2^64 fold */
    u128 above = high >> 63;
    u128 below = (high & (((u128)1 << 63) - 1)) << 64;
    return reduced(reduced(low) + reduced(above + below));
}

static u128 times_signed(u128 x, int64_t y) {
    return y < 0 ? MODULUS - times(x, -(uint64_t)y) : times(x, (uint64_t)y);
}

/* Digest a run of an array's bytes.
 *
 * bytes, nbytes   the run, at least one byte, at any address
 * start           where it starts in its first block, below BLOCK_NBYTES
 * blocks          16 * SUMS bytes for each block that the run touches: the weights of its sums
 * words, rows     weights of the words of a row and of the sums of the rows of a block: integers
 *                 from 0 to 2^14 - 1, at addresses that are multiples of 64
 * total           receives the two halves of a number modulo 2^127 - 1, the lower one first
 */
EXPORT void restride_digest(int32_t level, const uint8_t *bytes, int64_t nbytes, int64_t start,
                            const uint8_t *blocks, const double *words, const double *rows,
                            uint64_t *total) {
    weights_t weights = {words, rows};
    u128 sum = 0;
    while (nbytes > 0) {
        int64_t room = BLOCK_NBYTES - start;
        int64_t given = nbytes < room ? nbytes : room;
        part_t part = {bytes, start, start + given};
        sums_t sums;
        sum_block(level, &part, weights, &sums);
        for (int place = 0; place < SUMS; place++) {
            u128 weight;
            memcpy(&weight, blocks + 16 * place, 16);
            weight = reduced(weight);
            int64_t high = (int64_t)(sums.high[place] / LIMB);
            int64_t low = (int64_t)sums.low[place];
            sum = reduced(sum + times_signed(times(weight, (uint64_t)LIMB), high));
            sum = reduced(sum + times_signed(weight, low));
        }
        bytes += given;
        nbytes -= given;
        blocks += 16 * SUMS;
        start = 0;
    }
    total[0] = (uint64_t)sum;
    total[1] = (uint64_t)(sum >> 64);
}
