/* What the machine can do: copy files with some threads, and nothing else.
 *
 *     cc -O3 -pthread limit.c ../src/restride/arrays/_kernel.c -o limit
 *     ./limit THREADS DIGESTS OUT FILE...
 *
 * No tensor is looked at. Where DIGESTS is 1 every chunk is digested, by the function that restride
 * uses. Each thread takes the next file, in calls of 128 KiB; one more hands what is done to the disk,
 * so that nobody has to wait for it earlier than must be. That is how `restride convert --no-sync`
 * moves bytes, and less cannot be done through the page cache.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CHUNK = 128 << 10, PART = 64 << 20, MOST_PARTS = 1 << 20 };

int32_t restride_level(void);
void restride_digest(int32_t level, const uint8_t *bytes, int64_t nbytes, int64_t start,
                     const uint8_t *blocks, const uint64_t *words, const uint64_t *rows,
                     uint64_t *total);

/* Any weights take as long, but for memory that was never written: all of it is one page of zeros. */
static uint8_t block_weights[2][32];
static uint64_t word_weights[256 * 4] __attribute__((aligned(64)));
static uint64_t row_weights[256 * 8] __attribute__((aligned(64)));

typedef struct {
    int file;
    off_t start;
} part_t;

static char **names;
static int count, digests;
static const char *out;
static atomic_int next_file, parts, is_over;
static part_t done[MOST_PARTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void *copy_files(void *unused) {
    char *buffer = aligned_alloc(4096, CHUNK);
    for (int i; (i = atomic_fetch_add(&next_file, 1)) < count;) {
        char path[4096];
        const char *base = strrchr(names[i], '/');
        snprintf(path, sizeof path, "%s/%s", out, base ? base + 1 : names[i]);
        int from = open(names[i], O_RDONLY), to = open(path, O_RDWR | O_CREAT | O_EXCL, 0644);
        struct stat status;
        if (from < 0 || to < 0 || fstat(from, &status)) fail(path);
        if (status.st_size && posix_fallocate(to, 0, status.st_size)) fail(path);
        for (off_t at = 0; at < status.st_size;) {
            ssize_t some = pread(from, buffer, CHUNK, at);
            if (some <= 0) fail(path);
            uint64_t total[2];
            if (digests)
                restride_digest(restride_level(), (const uint8_t *)buffer, some, at % (2 * CHUNK),
                                block_weights[0], word_weights, row_weights, total);
            if (pwrite(to, buffer, some, at) != some) fail(path);
            at += some;
            if (at % PART == 0 || at == status.st_size) {
                pthread_mutex_lock(&lock);
                int place = atomic_load(&parts);
                if (place < MOST_PARTS) {
                    done[place] = (part_t){to, (at - 1) / PART * PART};
                    atomic_store(&parts, place + 1);
                }
                pthread_mutex_unlock(&lock);
            }
        }
        close(from);
    }
    free(buffer);
    return unused;
}

static void *hand_over(void *unused) {
    for (int place = 0; !atomic_load(&is_over);) {
        if (place < atomic_load(&parts)) {
            sync_file_range(done[place].file, done[place].start, PART, SYNC_FILE_RANGE_WRITE);
            place++;
        } else {
            usleep(500);
        }
    }
    return unused;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    int threads = atoi(argv[1]);
    digests = atoi(argv[2]);
    out = argv[3];
    names = argv + 4;
    count = argc - 4;
    if (threads < 1 || threads > 64) return 2;
    memset(block_weights, 1, sizeof block_weights);
    memset(word_weights, 1, sizeof word_weights);
    memset(row_weights, 1, sizeof row_weights);
    if (mkdir(out, 0755)) fail(out);
    pthread_t each[64], disk;
    pthread_create(&disk, NULL, hand_over, NULL);
    for (int i = 0; i < threads; i++) pthread_create(&each[i], NULL, copy_files, NULL);
    for (int i = 0; i < threads; i++) pthread_join(each[i], NULL);
    atomic_store(&is_over, 1);
    /* It ends with the process: it may be waiting for the disk, which nobody asked it to. */
    return 0;
}
