/* The sums of a block, for vectors of LANES doubles. Included by `_kernel.c` once for each width.
 *
 * Sums stay in registers: a vector holds LANES of the 8 sums of a row, and TILE rows are summed at a
 * time, so that additions need not wait for each other and a weight that was loaded serves TILE words.
 * All numbers are integers that a double holds exactly, see `fingerprint.py`.
 */
#define VECTORS (SUMS / LANES)
/* Additions that need not wait for each other, where there are fewer vectors than that takes. */
#define CHAINS (LANES / 2)
#define UNROLLED _Pragma("GCC unroll 16")

typedef double LEVEL(vector) __attribute__((vector_size(8 * LANES)));

TARGET static void LEVEL(sum_rows)(const uint8_t *const tile[TILE], const double *weights,
                                   double *sums) {
    typedef LEVEL(vector) vector;
    double words[TILE][CHUNK] __attribute__((aligned(64)));
    vector held[TILE][VECTORS];
    UNROLLED for (int row = 0; row < TILE; row++)
        UNROLLED for (int at = 0; at < VECTORS; at++) held[row][at] = (vector){0};
    for (int first = 0; first < WORDS; first += CHUNK) {
        for (int row = 0; row < TILE; row++) {
            const uint8_t *chunk = tile[row] + 4 * first;
            /* The same of the next tile: TILE short runs are no pattern that the machine sees. */
            for (int at = 0; at < 4 * CHUNK; at += 64)
                __builtin_prefetch(chunk + TILE * ROW_NBYTES + at);
            for (int place = 0; place < CHUNK; place++) {
                int32_t word;
                memcpy(&word, chunk + 4 * place, 4);
                words[row][place] = word;
            }
        }
        for (int place = 0; place < CHUNK; place++) {
            const vector *weight = (const vector *)(weights + SUMS * (first + place));
            UNROLLED for (int row = 0; row < TILE; row++)
                UNROLLED for (int at = 0; at < VECTORS; at++)
                    held[row][at] += weight[at] * words[row][place];
        }
    }
    UNROLLED for (int row = 0; row < TILE; row++)
        UNROLLED for (int at = 0; at < VECTORS; at++)
            ((vector *)(sums + SUMS * row))[at] = held[row][at];
}

TARGET static void LEVEL(sum_block)(const part_t *part, weights_t weights, sums_t *sums) {
    typedef LEVEL(vector) vector;
    double by_row[TILE * SUMS] __attribute__((aligned(64)));
    uint8_t edges[TILE][ROW_NBYTES];
    const uint8_t *tile[TILE];
    vector high[CHAINS][VECTORS], low[CHAINS][VECTORS];
    memset(high, 0, sizeof high);
    memset(low, 0, sizeof low);
    int64_t stop = (part->stop + ROW_NBYTES - 1) / ROW_NBYTES;
    for (int64_t first = part->start / ROW_NBYTES; first < stop; first += TILE) {
        for (int row = 0; row < TILE; row++) tile[row] = whole_row(part, first + row, edges[row]);
        LEVEL(sum_rows)(tile, weights.words, by_row);
        int count = stop - first < TILE ? (int)(stop - first) : TILE;
        const double *of_rows = weights.rows + SUMS * SUMS * first;
        for (int place = 0; place < SUMS * count; place += CHAINS)
            UNROLLED for (int chain = 0; chain < CHAINS; chain++) {
                /* A sum of 53 bits in two limbs, so that sums of 2048 of them are exact too. */
                double sum = by_row[place + chain];
                double above = (sum + SPLITTER) - SPLITTER;
                double below = sum - above;
                const vector *weight = (const vector *)(of_rows + SUMS * (place + chain));
                UNROLLED for (int at = 0; at < VECTORS; at++) {
                    high[chain][at] += weight[at] * above;
                    low[chain][at] += weight[at] * below;
                }
            }
    }
    for (int chain = 1; chain < CHAINS; chain++)
        for (int at = 0; at < VECTORS; at++) {
            high[0][at] += high[chain][at];
            low[0][at] += low[chain][at];
        }
    memcpy(sums->high, high[0], sizeof sums->high);
    memcpy(sums->low, low[0], sizeof sums->low);
}

#undef CHAINS
#undef LEVEL
#undef TARGET
#undef LANES
#undef TILE
#undef VECTORS
#undef UNROLLED
