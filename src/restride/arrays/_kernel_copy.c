/* Strided copies: a nest of loops over runs of bytes, each at one place in the source and one in the
 * target. See `_kernel.c` for what all of this is.
 *
 * The loops are brought into an order in which the target is written nearly in sequence. Long runs
 * are left to memcpy, short ones are moved in a few words of fixed size. Where the loop that stays
 * within a cache line of the source is another one than that of the target, words are moved in tiles,
 * so that no line is fetched twice. Thresholds are measured, see `benchmarks/arrays.py`: they change
 * the time and never the result.
 */
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINED static inline __attribute__((always_inline))

enum {
    LINE = 64, /* bytes of a cache line */
    MOST_AXES = 32,
    LONGEST_WORD = 16,
    LONGEST_SHORT = 128, /* bytes of a run that is not worth a call of memcpy */
    /* Runs with gaps between them are fetched so many bytes before their turn; those of a length
     * between LONGEST_SHORT and LEAST_FETCHED are found in time without. */
    AHEAD_NBYTES = 4096,
    LEAST_FETCHED = 1024,
    /* Lines of the target that are written in turn: about as many pages stay known to the machine. */
    PANEL = 512,
    BLOCK = 32, /* steps of both loops of a tile of runs that are no words */
    /* Bytes that no cache near the core holds: whole lines are written past it, since they would be
     * gone before anybody reads them, and need not be read before they are written. */
    LARGE_NBYTES = 8 << 20,
    /* Runs with gaps from this length gain by it as well, where each line is fetched so early. */
    LEAST_GAPPED = 1024,
    STREAMED_AHEAD_NBYTES = 2048,
    /* Nor do two of these fit into the largest one: so are runs at any place, from this length. */
    HUGE_NBYTES = 16 << 20,
    LEAST_STREAMED = 16 << 10,
};

/* One loop. Strides are in bytes. */
typedef struct {
    int64_t extent;
    int64_t source;
    int64_t target;
} axis_t;

static const axis_t ONCE = {1, 0, 0};

static int64_t size_of(int64_t stride) { return stride < 0 ? -stride : stride; }

/* ---- Stores --------------------------------------------------------------------------------- */

static void store_line(uint8_t *target, const uint8_t *line, int is_past_cache) {
#if defined(__SSE2__)
    if (is_past_cache) {
        for (int at = 0; at < LINE; at += 16)
            _mm_stream_si128((__m128i *)(target + at), _mm_loadu_si128((const __m128i *)(line + at)));
        return;
    }
#endif
    (void)is_past_cache;
    memcpy(target, line, LINE);
}

/* At the end of a call, before anybody else may look at what was stored past the cache. */
static void end_stores(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* ---- Lines: two nested loops over runs, in the order they are given --------------------------- */

/* How many steps of a loop ahead its runs are fetched: the machine sees no pattern in runs with gaps,
 * and waits for each. Where it does not pay, 0. */
static int64_t steps_ahead(const axis_t *inner, int64_t nbytes) {
    if (nbytes < LONGEST_WORD || size_of(inner->source) < LINE) return 0;
    if (nbytes > LONGEST_SHORT && nbytes < LEAST_FETCHED) return 0;
    return nbytes < AHEAD_NBYTES ? AHEAD_NBYTES / nbytes : 1;
}

/* Every second or fourth word: with constant steps the compiler has vectors for it. */
INLINED int gather_words(uint8_t *restrict to, const uint8_t *restrict from, axis_t inner,
                         const int word) {
    if (inner.target != word) return 0;
    if (inner.source == 2 * word)
        for (int64_t j = 0; j < inner.extent; j++) memcpy(to + j * word, from + j * 2 * word, word);
    else if (inner.source == 4 * word)
        for (int64_t j = 0; j < inner.extent; j++) memcpy(to + j * word, from + j * 4 * word, word);
    else return 0;
    return 1;
}

/* A run is `pairs` words from the front and as many from the back, which overlap where they must; or
 * one word, where `pairs` is 0. Both are constants where this is called, and no loop is left of them. */
INLINED void move_runs(uint8_t *target, const uint8_t *source, axis_t outer, axis_t inner,
                       int64_t nbytes, const int word, const int pairs) {
    int64_t ahead = steps_ahead(&inner, nbytes) * inner.source;
    for (int64_t i = 0; i < outer.extent; i++) {
        uint8_t *restrict to = target + i * outer.target;
        const uint8_t *restrict from = source + i * outer.source;
        if (!pairs && gather_words(to, from, inner, word)) continue;
        for (int64_t j = 0; j < inner.extent; j++, to += inner.target, from += inner.source) {
            if (pairs && ahead) {
                __builtin_prefetch(from + ahead);
                __builtin_prefetch(from + ahead + nbytes - 1);
            }
            if (!pairs) memcpy(to, from, word);
            for (int k = 0; k < pairs; k++) {
                int64_t back = nbytes - (k + 1) * word;
                memcpy(to + k * word, from + k * word, word);
                memcpy(to + back, from + back, word);
            }
        }
    }
}

static void move_long_runs(uint8_t *target, const uint8_t *source, axis_t outer, axis_t inner,
                           int64_t nbytes) {
    int64_t ahead = steps_ahead(&inner, nbytes) * inner.source;
    int64_t fetched = nbytes < AHEAD_NBYTES ? nbytes : AHEAD_NBYTES;
    for (int64_t i = 0; i < outer.extent; i++)
        for (int64_t j = 0; j < inner.extent; j++) {
            const uint8_t *from = source + i * outer.source + j * inner.source;
            if (ahead)
                for (int64_t at = 0; at < fetched; at += LINE) __builtin_prefetch(from + ahead + at);
            memcpy(target + i * outer.target + j * inner.target, from, (size_t)nbytes);
        }
}

/* Runs of a line and more, of which whole lines are written past the cache. A line in which one run
 * ends and the next one begins is put together first; what is left of others is not written past it. */
static void stream_runs(uint8_t *target, const uint8_t *source, axis_t outer, axis_t inner,
                        int64_t nbytes) {
    uint8_t edge[LINE] __attribute__((aligned(LINE)));
    int is_dense = inner.target == nbytes, has_gaps = inner.source != nbytes;
    int64_t runs = STREAMED_AHEAD_NBYTES / nbytes, rest = STREAMED_AHEAD_NBYTES % nbytes;
    for (int64_t i = 0; i < outer.extent; i++) {
        int64_t kept = 0; /* bytes of the run before, at the front of `edge` */
        for (int64_t j = 0; j < inner.extent; j++) {
            uint8_t *to = target + i * outer.target + j * inner.target;
            const uint8_t *from = source + i * outer.source + j * inner.source;
            const uint8_t *ahead = from + runs * inner.source + rest;
            int64_t at = (int64_t)(-(uintptr_t)to % LINE);
            memcpy(kept ? edge + kept : to, from, (size_t)at);
            if (kept) store_line(to - kept, edge, 1);
            for (; at + LINE <= nbytes; at += LINE) {
                if (has_gaps && at + rest < nbytes) __builtin_prefetch(ahead + at);
                else if (has_gaps) __builtin_prefetch(ahead + at + inner.source - nbytes);
                store_line(to + at, from + at, 1);
            }
            kept = is_dense && j + 1 < inner.extent ? nbytes - at : 0;
            memcpy(kept ? edge : to + at, from + at, (size_t)(nbytes - at));
        }
    }
}

static void lines(uint8_t *target, const uint8_t *source, axis_t outer, axis_t inner,
                  int64_t nbytes) {
#define RUNS(word, pairs) move_runs(target, source, outer, inner, nbytes, word, pairs)
    if (nbytes == 1) RUNS(1, 0);
    else if (nbytes == 2) RUNS(2, 0);
    else if (nbytes < 4) RUNS(2, 1);
    else if (nbytes == 4) RUNS(4, 0);
    else if (nbytes < 8) RUNS(4, 1);
    else if (nbytes == 8) RUNS(8, 0);
    else if (nbytes < 16) RUNS(8, 1);
    else if (nbytes == 16) RUNS(16, 0);
    else if (nbytes <= 32) RUNS(16, 1);
    else if (nbytes <= 64) RUNS(16, 2);
    else if (nbytes <= LONGEST_SHORT) RUNS(16, 4);
    else move_long_runs(target, source, outer, inner, nbytes);
#undef RUNS
}

/* ---- Tiles: two loops, of which one is short-stepped in the source and the other in the target - */

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLES 1
#endif
#endif

/* Transpose a square of words that fills `count` vectors of 16 bytes. Each round interleaves the
 * first half of the vectors with the second; after as many rounds as `count` has bits, the words of
 * a row have become those of a column. */
#ifdef HAS_SHUFFLES
#define SQUARE(nbytes, type, count, rounds, first, second)                                \
    typedef type square_##nbytes __attribute__((vector_size(16)));                        \
    INLINED void transpose_##nbytes(uint8_t *target, int64_t target_stride,         \
                                          const uint8_t *source, int64_t source_stride) { \
        square_##nbytes now[count], next[count];                                          \
        for (int i = 0; i < (count); i++) memcpy(&now[i], source + i * source_stride, 16); \
        for (int round = 0; round < (rounds); round++) {                                  \
            for (int i = 0; i < (count) / 2; i++) {                                       \
                next[2 * i] = __builtin_shufflevector(now[i], now[i + (count) / 2], first); \
                next[2 * i + 1] = __builtin_shufflevector(now[i], now[i + (count) / 2], second); \
            }                                                                             \
            for (int i = 0; i < (count); i++) now[i] = next[i];                           \
        }                                                                                 \
        for (int i = 0; i < (count); i++) memcpy(target + i * target_stride, &now[i], 16); \
    }
#define LIST(...) __VA_ARGS__
#else
#define SQUARE(nbytes, type, count, rounds, first, second)                                \
    INLINED void transpose_##nbytes(uint8_t *target, int64_t target_stride,         \
                                          const uint8_t *source, int64_t source_stride) { \
        for (int i = 0; i < (count); i++)                                                 \
            for (int j = 0; j < (count); j++)                                             \
                memcpy(target + i * target_stride + j * (nbytes),                         \
                       source + j * source_stride + i * (nbytes), nbytes);                \
    }
#define LIST(...)
#endif

SQUARE(1, int8_t, 16, 4, LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
       LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
SQUARE(2, int16_t, 8, 3, LIST(0, 8, 1, 9, 2, 10, 3, 11), LIST(4, 12, 5, 13, 6, 14, 7, 15))
SQUARE(4, int32_t, 4, 2, LIST(0, 4, 1, 5), LIST(2, 6, 3, 7))
SQUARE(8, int64_t, 2, 1, LIST(0, 2), LIST(1, 3))

INLINED void transpose(uint8_t *target, int64_t target_stride, const uint8_t *source,
                       int64_t source_stride, const int word) {
    if (word == 1) transpose_1(target, target_stride, source, source_stride);
    if (word == 2) transpose_2(target, target_stride, source, source_stride);
    if (word == 4) transpose_4(target, target_stride, source, source_stride);
    if (word == 8) transpose_8(target, target_stride, source, source_stride);
}

/* Words that are neighbours in the target along one loop, and in the source across it. A tile is as
 * many lines as a line has words. It is turned in a buffer and leaves it line by line, since lines
 * whose distance is a power of two push each other out of the cache. */
INLINED void turn(uint8_t *target, const uint8_t *source, axis_t across, axis_t along,
                  int is_large, const int word) {
    const int side = LINE / word, step = 16 / word;
    uint8_t buffer[LINE * LINE] __attribute__((aligned(LINE)));
    int64_t before = (int64_t)(-(uintptr_t)target % LINE) / word; /* words to the next line */
    if (is_large && !((uintptr_t)target % word) && before < along.extent) {
        axis_t left = {before, along.source, along.target};
        lines(target, source, across, left, word);
        target += before * word;
        source += before * along.source;
        along.extent -= before;
    }
    int is_past_cache = is_large && !((uintptr_t)target % LINE) && !(across.target % LINE);
    int64_t wide = along.extent - along.extent % side;
    int64_t high = across.extent - across.extent % side;
    for (int64_t panel = 0; panel < high; panel += PANEL) {
        int64_t stop = high - panel < PANEL ? high : panel + PANEL;
        for (int64_t i = 0; i < wide; i += side)
            for (int64_t j = panel; j < stop; j += side) {
                const uint8_t *from = source + i * along.source + j * word;
                uint8_t *to = target + i * word + j * across.target;
                for (int k = 0; k < side; k++)
                    __builtin_prefetch(from + k * along.source + LINE);
                for (int k = 0; k < side; k += step)
                    for (int m = 0; m < side; m += step)
                        transpose(buffer + LINE * m + word * k, LINE,
                                  from + k * along.source + m * word, along.source, word);
                for (int m = 0; m < side; m++)
                    store_line(to + m * across.target, buffer + LINE * m, is_past_cache);
            }
    }
    axis_t right = {along.extent - wide, along.source, along.target};
    axis_t upper = {high, across.source, across.target};
    axis_t lower = {across.extent - high, across.source, across.target};
    lines(target + wide * word, source + wide * along.source, upper, right, word);
    lines(target + high * across.target, source + high * word, lower, along, word);
}

/* Any other two loops: blocks of both. */
static void move_blocks(uint8_t *target, const uint8_t *source, axis_t across, axis_t along,
                        int64_t nbytes) {
    for (int64_t i = 0; i < along.extent; i += BLOCK)
        for (int64_t j = 0; j < across.extent; j += BLOCK) {
            axis_t outer = across, inner = along;
            outer.extent = across.extent - j < BLOCK ? across.extent - j : BLOCK;
            inner.extent = along.extent - i < BLOCK ? along.extent - i : BLOCK;
            lines(target + i * along.target + j * across.target,
                  source + i * along.source + j * across.source, outer, inner, nbytes);
        }
}

static void tiles(uint8_t *target, const uint8_t *source, axis_t across, axis_t along,
                  int64_t nbytes, int is_large) {
    int is_square = along.target == nbytes && across.source == nbytes;
    if (is_square && nbytes == 1) turn(target, source, across, along, is_large, 1);
    else if (is_square && nbytes == 2) turn(target, source, across, along, is_large, 2);
    else if (is_square && nbytes == 4) turn(target, source, across, along, is_large, 4);
    else if (is_square && nbytes == 8) turn(target, source, across, along, is_large, 8);
    else move_blocks(target, source, across, along, nbytes);
}

/* ---- The nest --------------------------------------------------------------------------------- */

typedef struct {
    axis_t axes[MOST_AXES]; /* outermost first */
    int32_t count;
    int64_t nbytes; /* of a run */
    int is_tiled;   /* whether the last two axes are */
    double all_nbytes; /* of the whole call */
} nest_t;

/* Sort loops by falling stride of the target, and merge those that go on where others end. */
static void put_in_order(nest_t *nest) {
    axis_t *axes = nest->axes;
    for (int32_t i = 1; i < nest->count; i++) {
        axis_t axis = axes[i];
        int32_t at = i;
        for (; at > 0 && axes[at - 1].target < axis.target; at--) axes[at] = axes[at - 1];
        axes[at] = axis;
    }
    int32_t kept = 0;
    for (int32_t i = 0; i < nest->count; i++) {
        axis_t *last = kept ? &axes[kept - 1] : NULL;
        if (last && last->target == axes[i].extent * axes[i].target &&
            last->source == axes[i].extent * axes[i].source) {
            axes[i].extent *= last->extent;
            *last = axes[i];
        } else {
            axes[kept++] = axes[i];
        }
    }
    nest->count = kept;
    if (kept && axes[kept - 1].target == nest->nbytes && axes[kept - 1].source == nest->nbytes)
        nest->nbytes *= axes[--nest->count].extent;
}

/* Bring the loop with the shortest step in the source beside the innermost, if that is another. */
static void choose_tiles(nest_t *nest) {
    axis_t *axes = nest->axes;
    int32_t last = nest->count - 1, shortest = last;
    nest->is_tiled = 0;
    if (nest->count < 2 || nest->nbytes >= LINE) return;
    for (int32_t i = last - 1; i >= 0; i--)
        if (size_of(axes[i].source) < size_of(axes[shortest].source)) shortest = i;
    if (shortest == last || size_of(axes[last].source) < LINE) return;
    axis_t across = axes[shortest];
    for (int32_t i = shortest; i < last - 1; i++) axes[i] = axes[i + 1];
    axes[last - 1] = across;
    nest->is_tiled = 1;
}

/* Whether runs are written past the cache: long ones, and those that fill whole lines, alone or one
 * behind the other, and are read in sequence or with gaps that are worth it. */
static int is_streamed(const nest_t *nest, const uint8_t *target, axis_t outer, axis_t inner) {
    if (nest->all_nbytes >= HUGE_NBYTES && nest->nbytes >= LEAST_STREAMED) return 1;
    if (nest->all_nbytes < LARGE_NBYTES) return 0;
    if (nest->nbytes >= LEAST_GAPPED && inner.target == nest->nbytes) return 1;
    return (inner.source == nest->nbytes || nest->nbytes >= LEAST_GAPPED) &&
           !(((uintptr_t)target | (uintptr_t)outer.target | (uintptr_t)inner.target |
              (uintptr_t)nest->nbytes) % LINE);
}

static void walk(const nest_t *nest, int32_t depth, uint8_t *target, const uint8_t *source) {
    int32_t left = nest->count - depth;
    const axis_t *axis = &nest->axes[depth];
    if (left == 2 && nest->is_tiled) {
        tiles(target, source, axis[0], axis[1], nest->nbytes, nest->all_nbytes >= LARGE_NBYTES);
    } else if (left <= 2) {
        axis_t outer = left == 2 ? axis[0] : ONCE;
        axis_t inner = left >= 1 ? axis[left - 1] : ONCE;
        if (is_streamed(nest, target, outer, inner))
            stream_runs(target, source, outer, inner, nest->nbytes);
        else lines(target, source, outer, inner, nest->nbytes);
    } else {
        for (int64_t i = 0; i < axis->extent; i++)
            walk(nest, depth + 1, target + i * axis->target, source + i * axis->source);
    }
}

static double nbytes_of(int32_t count, const int64_t *axes, int64_t nbytes) {
    double all = (double)nbytes;
    for (int32_t i = 0; i < count; i++) all *= (double)axes[3 * i];
    return all;
}

static int32_t copy_nest(uint8_t *target, const uint8_t *source, int32_t count, const int64_t *axes,
                         int64_t nbytes, double all_nbytes) {
    nest_t nest = {.nbytes = nbytes, .all_nbytes = all_nbytes};
    for (int32_t i = 0; i < count; i++) {
        axis_t axis = {axes[3 * i], axes[3 * i + 1], axes[3 * i + 2]};
        if (axis.extent == 0) return 0;
        if (axis.extent == 1) continue;
        if (nest.count == MOST_AXES) return 1;
        if (axis.target < 0) {
            /* The same steps from the other end. */
            target += (axis.extent - 1) * axis.target;
            source += (axis.extent - 1) * axis.source;
            axis.target = -axis.target;
            axis.source = -axis.source;
        }
        nest.axes[nest.count++] = axis;
    }
    put_in_order(&nest);
    choose_tiles(&nest);
    walk(&nest, 0, target, source);
    return 0;
}

/* Copy runs of bytes.
 *
 * target, source   addresses of the first run; the memory that is written and the memory that is
 *                  read have no byte in common
 * count, axes      loops: extent, stride in the source, stride in the target, both in bytes and of
 *                  any sign; no two steps write the same byte
 * nbytes           of a run, at least 1
 *
 * Returns 0, or 1 without having done anything where there are more loops than it can hold.
 */
EXPORT int32_t restride_copy(uint8_t *target, const uint8_t *source, int32_t count,
                             const int64_t *axes, int64_t nbytes) {
    double all = nbytes_of(count, axes, nbytes);
    int32_t failed = copy_nest(target, source, count, axes, nbytes, all);
    end_stores();
    return failed;
}

/* Copy one nest after another into one array.
 *
 * target, sources   addresses from which the places below count
 * copies, count     of each: which source, place in the target, place in the source, bytes of a run,
 *                   how many loops, the loops as above
 *
 * Returns as `restride_copy`; copies before the one with too many loops are done.
 */
EXPORT int32_t restride_copy_each(uint8_t *target, const uint8_t *const *sources,
                                  const int64_t *copies, int64_t count) {
    const int64_t *at = copies;
    double all = 0;
    for (int64_t i = 0; i < count; i++, at += 5 + 3 * at[4])
        all += nbytes_of((int32_t)at[4], at + 5, at[3]);
    at = copies;
    int32_t failed = 0;
    for (int64_t i = 0; i < count && !failed; i++, at += 5 + 3 * at[4])
        failed = copy_nest(target + at[1], sources[at[0]] + at[2], (int32_t)at[4], at + 5, at[3],
                           all);
    end_stores();
    return failed;
}
