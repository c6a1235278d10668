/* Programs: reads, copies, digests and writes that follow one another, in one call.
 *
 * Between two calls of the system a thread of Python has to get the interpreter's lock, and waking it
 * costs about as much as a chunk of the copy itself; in here it needs none. `program.py` writes the
 * programs, and has proved what is said of every address; when one fails it does the same work step
 * by step, and finds the same error where it can say what it is.
 */
/* Before the first header: later they change nothing. */
#define _FILE_OFFSET_BITS 64
#ifdef __linux__
#define _GNU_SOURCE 1 /* for sync_file_range */
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "places in files are numbers of 64 bits");

#define EXPORT __attribute__((visibility("default")))

void restride_digest(int32_t level, const uint8_t *bytes, int64_t nbytes, int64_t start,
                     const uint8_t *blocks, const uint64_t *words, const uint64_t *rows,
                     uint64_t *total);
int32_t restride_copy(uint8_t *target, const uint8_t *source, int32_t count, const int64_t *axes,
                      int64_t nbytes);
int32_t restride_same(const uint8_t *a, const uint8_t *b, int64_t nbytes);

enum {
    READ = 1, /* descriptor, at, address, nbytes */
    COPY,     /* target, source, nbytes of a run, count, [count][3] loops */
    WRITE,    /* descriptor, at, address, nbytes, start, blocks, [blocks][4] weights */
    MOVE,     /* descriptor, at, descriptor, at, nbytes, buffer, nbytes of it, start, blocks,
                 [blocks][4] weights */
    SAME,     /* address, address, nbytes */
};

enum {
    BLOCK_NBYTES = 256 << 10, /* of a digest */
    BLOCK_NUMBERS = 4,        /* that the weights of a block take */
    /* Linux looks for one run of pages for what one call writes. For a longer one it has to shift
     * pages about first where memory is in use, which takes up to five times the copy; and for a
     * call that starts at no multiple of its size it takes many short ones. */
    WRITE_NBYTES = 128 << 10,
};

typedef unsigned __int128 u128;
#define MODULUS ((((u128)1) << 127) - 1)

typedef struct {
    int32_t level;
    const uint64_t *words;
    const uint64_t *rows;
} digester_t;

static int read_all(int64_t descriptor, int64_t at, uint8_t *into, int64_t nbytes) {
    while (nbytes > 0) {
        ssize_t done = pread((int)descriptor, into, (size_t)nbytes, at);
        if (done <= 0) return 1;
        into += done;
        at += done;
        nbytes -= done;
    }
    return 0;
}

static int write_all(int64_t descriptor, int64_t at, const uint8_t *from, int64_t nbytes) {
    while (nbytes > 0) {
        int64_t some = WRITE_NBYTES - at % WRITE_NBYTES;
        if (some > nbytes) some = nbytes;
        ssize_t done = pwrite((int)descriptor, from, (size_t)some, at);
        if (done <= 0) return 1;
        from += done;
        at += done;
        nbytes -= done;
    }
    return 0;
}

/* Add the digest of a run that starts in the first of some blocks, or in a later one. */
static void digest(const digester_t *with, const uint8_t *bytes, int64_t nbytes, int64_t start,
                   const int64_t *blocks, uint64_t total[2]) {
    uint64_t part[2];
    blocks += start / BLOCK_NBYTES * BLOCK_NUMBERS;
    restride_digest(with->level, bytes, nbytes, start % BLOCK_NBYTES, (const uint8_t *)blocks,
                    with->words, with->rows, part);
    u128 sum = ((u128)total[1] << 64 | total[0]) + ((u128)part[1] << 64 | part[0]);
    if (sum >= MODULUS) sum -= MODULUS;
    total[0] = (uint64_t)sum;
    total[1] = (uint64_t)(sum >> 64);
}

/* From file to file through a buffer that stays in the cache of the core. */
static int move(const digester_t *with, const int64_t *of, uint64_t total[2]) {
    int64_t from = of[1], to = of[3], left = of[4], size = of[6], start = of[7];
    uint8_t *buffer = (uint8_t *)of[5];
    while (left > 0) {
        int64_t some = size - to % size;
        if (some > left) some = left;
        if (read_all(of[0], from, buffer, some)) return 1;
        digest(with, buffer, some, start, of + 9, total);
        if (write_all(of[2], to, buffer, some)) return 1;
        from += some;
        to += some;
        start += some;
        left -= some;
    }
    return 0;
}

/* Run a program.
 *
 * program, count   numbers: of each step its kind and what is listed there. A run that is digested
 *                  starts `start` bytes after its first block, and has the weights of all blocks
 *                  that it touches; the buffer of a MOVE has at least one byte
 * words, rows      as for `restride_digest`
 * totals           receives two halves for each WRITE and MOVE, in their order
 *
 * Returns 0; 1 where the system did not do what it was asked, 2 where there are too many loops, 3 where
 * bytes differ that were to be the same. What was written then is a part of what was asked, and
 * `totals` is of no use.
 */
EXPORT int32_t restride_run(int32_t level, const int64_t *program, int64_t count,
                            const uint64_t *words, const uint64_t *rows, uint64_t *totals) {
    digester_t with = {level, words, rows};
    const int64_t *at = program, *stop = program + count;
    while (at < stop) {
        int64_t kind = *at++;
        if (kind == READ) {
            if (read_all(at[0], at[1], (uint8_t *)at[2], at[3])) return 1;
            at += 4;
        } else if (kind == COPY) {
            if (restride_copy((uint8_t *)at[0], (const uint8_t *)at[1], (int32_t)at[3], at + 4,
                              at[2]))
                return 2;
            at += 4 + 3 * at[3];
        } else if (kind == WRITE) {
            totals[0] = totals[1] = 0;
            digest(&with, (const uint8_t *)at[2], at[3], at[4], at + 6, totals);
            if (write_all(at[0], at[1], (const uint8_t *)at[2], at[3])) return 1;
            at += 6 + BLOCK_NUMBERS * at[5];
            totals += 2;
        } else if (kind == SAME) {
            if (!restride_same((const uint8_t *)at[0], (const uint8_t *)at[1], at[2])) return 3;
            at += 3;
        } else {
            totals[0] = totals[1] = 0;
            if (move(&with, at, totals)) return 1;
            at += 9 + BLOCK_NUMBERS * at[8];
            totals += 2;
        }
    }
    return 0;
}

/* Have the system begin to write a part of a file to the disk, where it can be told. */
EXPORT void restride_start_writing(int32_t descriptor, int64_t start, int64_t nbytes) {
#ifdef SYNC_FILE_RANGE_WRITE
    (void)sync_file_range(descriptor, start, nbytes, SYNC_FILE_RANGE_WRITE);
#else
    (void)descriptor;
    (void)start;
    (void)nbytes;
#endif
}
