/* The totals of a block, for vectors of LANES numbers of 64 bits. Included by `_kernel.c` once for each width.
 *
 * A lane sums products of 32 by 24 bits, 256 at most over all lanes, so that none of it is lost; see
 * `fingerprint.py`. A vector of the row holds pairs of words: MULTIPLY takes the lower halves of its
 * lanes, which are the even words, and what is shifted has the odd ones there.
 */
typedef uint64_t LEVEL(vector) __attribute__((vector_size(8 * LANES)));
typedef uint64_t LEVEL(loaded) __attribute__((vector_size(8 * LANES), aligned(1), may_alias));

TARGET static inline void LEVEL(sum_row)(const uint8_t *row, const uint64_t *weights,
                                         uint64_t sums[SUMS]) {
    typedef LEVEL(vector) vector;
    vector held[SUMS] = {{0}};
    for (int at = 0; at < PAIRS; at += LANES) {
        __builtin_prefetch(row + ROW_NBYTES + 8 * at);
        vector even = *(const LEVEL(loaded) *)(row + 8 * at), odd = even >> 32;
        _Pragma("GCC unroll 4") for (int sum = 0; sum < SUMS; sum++) {
            const uint64_t *of_sum = weights + 2 * PAIRS * sum + at;
            held[sum] += MULTIPLY(even, *(const vector *)of_sum);
            held[sum] += MULTIPLY(odd, *(const vector *)(of_sum + PAIRS));
        }
    }
    for (int sum = 0; sum < SUMS; sum++) {
        sums[sum] = 0;
        for (int lane = 0; lane < LANES; lane++) sums[sum] += held[sum][lane];
    }
}

/* Sums of 64 bits times weights of 54 bits, 1024 of them, are below 2^128. */
TARGET static void LEVEL(sum_block)(const part_t *part, const uint64_t *words, const uint64_t *rows,
                                    u128 totals[TOTALS]) {
    uint8_t edge[ROW_NBYTES];
    uint64_t sums[SUMS];
    u128 found[TOTALS] = {0};
    for (int64_t row = part->start / ROW_NBYTES; row * ROW_NBYTES < part->stop; row++) {
        LEVEL(sum_row)(whole_row(part, row, edge), words, sums);
        const uint64_t *weights = rows + SUMS * TOTALS * row;
        for (int sum = 0; sum < SUMS; sum++)
            for (int total = 0; total < TOTALS; total++)
                found[total] += (u128)sums[sum] * weights[TOTALS * sum + total];
    }
    memcpy(totals, found, sizeof found);
}

#undef LEVEL
#undef TARGET
#undef LANES
#undef MULTIPLY
