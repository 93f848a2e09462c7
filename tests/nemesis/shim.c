/* Storage that fails, for LD_PRELOAD into one process: the n-th write, fsync or rename below a folder goes wrong, and
 * every change is noted so that a power cut can be played afterwards (powercut.py). SQLite's own writes come through
 * here, too, as they go through libc.
 *
 *   NEMESIS_ROOT     folder that is watched (absolute, without links)
 *   NEMESIS_STORAGE  faults, separated by commas: op:n:action[:count]
 *                    op      write | fsync | rename | any (one count over all three)
 *                    action  EIO | ENOSPC | EROFS (fail), short (write half, then one ENOSPC), kill (before the
 *                            operation), killafter, torn (write half, then kill)
 *                    count   how many operations in a row fail; 1 unless given
 *   NEMESIS_JOURNAL  file to which all changes below the folder are appended
 *   NEMESIS_FIRED    file to which each fault is appended when it happens
 *
 * Children of the process are not affected: LD_PRELOAD is taken out of its environment at once. Not seen: memory maps
 * (SQLite's -shm, which is rebuilt after a crash and is ignored here) and stdio of C libraries.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum op { OP_WRITE, OP_FSYNC, OP_RENAME, OP_ANY, OPS };
static const char *op_names[] = {"write", "fsync", "rename", "any"};
enum action { NONE, FAIL, SHORT, KILL, KILL_AFTER, TORN };

struct fault { enum op op; long n, count; enum action action; int error; const char *name; };
static struct fault faults[32];
static int fault_count;
static long counts[OPS];
static char root[PATH_MAX];
static size_t root_length;
static int journal = -1, fired = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int raw_open(const char *path) {
    return (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static void add_fault(char *text) {
    struct fault fault = {.count = 1};
    char *op = strtok(text, ":"), *n = strtok(NULL, ":"), *action = strtok(NULL, ":"), *count = strtok(NULL, ":");
    if (!op || !n || !action || fault_count == 32) abort();
    while (fault.op < OPS && strcmp(op_names[fault.op], op)) fault.op++;
    if (fault.op == OPS) abort();
    fault.n = atol(n);
    if (count) fault.count = atol(count);
    fault.name = action;
    if (!strcmp(action, "EIO")) fault.action = FAIL, fault.error = EIO;
    else if (!strcmp(action, "ENOSPC")) fault.action = FAIL, fault.error = ENOSPC;
    else if (!strcmp(action, "EROFS")) fault.action = FAIL, fault.error = EROFS;
    else if (!strcmp(action, "short")) fault.action = SHORT;
    else if (!strcmp(action, "kill")) fault.action = KILL;
    else if (!strcmp(action, "killafter")) fault.action = KILL_AFTER;
    else if (!strcmp(action, "torn")) fault.action = TORN;
    else abort();
    faults[fault_count++] = fault;
}

/* The process to be tested is forked from one that has done its imports, so it calls this itself. */
void nemesis_begin(void) {
    const char *folder = getenv("NEMESIS_ROOT"), *plan = getenv("NEMESIS_STORAGE");
    if (!folder) return;
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    if (getenv("NEMESIS_JOURNAL")) journal = raw_open(getenv("NEMESIS_JOURNAL"));
    if (getenv("NEMESIS_FIRED")) fired = raw_open(getenv("NEMESIS_FIRED"));
    if (!plan || !*plan) return;
    char *rest = strdup(plan), *one;
    while ((one = strsep(&rest, ","))) add_fault(strdup(one));
}

__attribute__((constructor)) static void begin(void) {
    unsetenv("LD_PRELOAD");
    nemesis_begin();
}

/* Whether `path` is the watched folder or below it, and no scratch file of SQLite. */
static int watched(const char *path) {
    if (!root_length || strncmp(path, root, root_length)) return 0;
    if (path[root_length] != '/' && path[root_length]) return 0;
    size_t n = strlen(path);
    return !(n > 4 && !strcmp(path + n - 4, "-shm")) && !(n > 5 && !strcmp(path + n - 5, ".lock"));
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n < 0) return 0;
    path[n] = 0;
    char *deleted = strstr(path, " (deleted)");
    if (deleted) *deleted = 0;
    return watched(path);
}

static int resolve(int folder, const char *name, char *path) {
    char base[PATH_MAX];
    if (!root_length) return 0;
    if (name[0] == '/') snprintf(path, PATH_MAX, "%s", name);
    else {
        if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
        else path_of(folder, base);
        snprintf(path, PATH_MAX, "%.*s/%s", (int)(PATH_MAX / 2), base, name);
    }
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') path[--n] = 0;
    return watched(path);
}

static void note(const char *text, const void *data, size_t size) {
    if (journal < 0) return;
    struct iovec parts[2] = {{(void *)text, strlen(text)}, {(void *)data, size}};
    if (syscall(SYS_writev, journal, parts, size ? 2 : 1) < 0) abort();
}

static const char *inside(const char *path) { return path[root_length] ? path + root_length + 1 : "."; }

static uint64_t inode_of(int fd) {
    struct stat info;
    return fstat(fd, &info) ? 0 : info.st_ino;
}

static void note_path(const char *op, const char *path, uint64_t inode) {
    char line[PATH_MAX + 64];
    snprintf(line, sizeof line, "%s\t%s\t%llu\n", op, inside(path), (unsigned long long)inode);
    note(line, NULL, 0);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static struct fault *due(enum op op) {
    counts[op]++, counts[OP_ANY]++;
    for (int i = 0; i < fault_count; i++) {
        struct fault *one = &faults[i];
        if (one->op != op && one->op != OP_ANY) continue;
        long n = counts[one->op];
        if (n < one->n || n >= one->n + one->count) continue;
        if (op != OP_WRITE && (one->action == SHORT || one->action == TORN)) continue;
        return one;
    }
    return NULL;
}

/* Say which fault happens; kill when it is time to. Returns the action that is left to do. */
static enum action strike(struct fault *one, enum op op, const char *path) {
    char line[PATH_MAX + 64];
    if (!one) return NONE;
    snprintf(line, sizeof line, "%s:%ld:%s %s\n", op_names[op], counts[op], one->name, inside(path));
    if (fired >= 0 && syscall(SYS_write, fired, line, strlen(line)) < 0) abort();
    if (one->action == KILL) die();
    return one->action;
}


static ssize_t written(int fd, const void *data, size_t size, off_t at, int placed) {
    char path[PATH_MAX], line[96];
    if (!root_length || !path_of(fd, path))
        return placed ? syscall(SYS_pwrite64, fd, data, size, at) : syscall(SYS_write, fd, data, size);
    pthread_mutex_lock(&lock);
    struct stat info;
    fstat(fd, &info);
    if (!placed) at = (fcntl(fd, F_GETFL) & O_APPEND) ? info.st_size : lseek(fd, 0, SEEK_CUR);
    struct fault *fault = due(OP_WRITE);
    enum action action = strike(fault, OP_WRITE, path);
    ssize_t done = -1;
    int error = fault ? fault->error : 0;
    if (action != FAIL) {
        if ((action == SHORT || action == TORN) && size > 1) size /= 2;
        done = placed ? syscall(SYS_pwrite64, fd, data, size, at) : syscall(SYS_write, fd, data, size);
        error = errno;
        if (done > 0) {
            snprintf(line, sizeof line, "W\t%llu\t%lld\t%zd\n", (unsigned long long)info.st_ino, (long long)at, done);
            note(line, data, (size_t)done);
        }
        if (action == KILL_AFTER || action == TORN) die();
        /* A disk that takes half of a write is full: the caller's next try must find that out. */
        if (action == SHORT) fault->n = counts[fault->op] + 1, fault->action = FAIL, fault->error = ENOSPC;
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

ssize_t write(int fd, const void *data, size_t size) { return written(fd, data, size, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return written(fd, data, size, at, 1); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return written(fd, data, size, at, 1); }

/* Callers fall back to plain reads and writes, which are seen above. */
ssize_t sendfile(int out, int in, off_t *at, size_t n) { (void)out, (void)in, (void)at, (void)n; errno = EINVAL; return -1; }
ssize_t sendfile64(int out, int in, off64_t *at, size_t n) { return sendfile(out, in, at, n); }
ssize_t copy_file_range(int a, off64_t *b, int c, off64_t *d, size_t n, unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)n, (void)f;
    errno = EXDEV;
    return -1;
}

static int synced(int fd, long number) {
    char path[PATH_MAX], line[64];
    if (!root_length || !path_of(fd, path)) return (int)syscall(number, fd);
    pthread_mutex_lock(&lock);
    struct fault *fault = due(OP_FSYNC);
    enum action action = strike(fault, OP_FSYNC, path);
    int result = -1, error = fault ? fault->error : 0;
    /* The files live in memory or on a disk that others use: the real sync would cost time and show nothing. */
    if (action != FAIL) {
        snprintf(line, sizeof line, "S\t%llu\n", (unsigned long long)inode_of(fd));
        note(line, NULL, 0);
        result = 0;
        if (action == KILL_AFTER) die();
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
    char source[PATH_MAX], target[PATH_MAX], line[2 * PATH_MAX + 8];
    int inner = resolve(from, old, source) & resolve(to, new, target);
    if (!inner) return (int)syscall(SYS_renameat2, from, old, to, new, flags);
    pthread_mutex_lock(&lock);
    struct fault *fault = due(OP_RENAME);
    enum action action = strike(fault, OP_RENAME, target);
    int result = -1, error = fault ? fault->error : 0;
    if (action != FAIL) {
        result = (int)syscall(SYS_renameat2, from, old, to, new, flags);
        error = errno;
        snprintf(line, sizeof line, "R\t%s\t%s\n", inside(source), inside(target));
        if (!result) note(line, NULL, 0);
        if (action == KILL_AFTER) die();
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int a, const char *old, int b, const char *new) { return renamed(a, old, b, new, 0); }
int renameat2(int a, const char *old, int b, const char *new, unsigned flags) { return renamed(a, old, b, new, flags); }

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !resolve(folder, name, path))
        return (int)syscall(SYS_openat, folder, name, flags, mode);
    pthread_mutex_lock(&lock);
    struct stat info;
    int existed = !fstatat(folder, name, &info, 0);
    int fd = (int)syscall(SYS_openat, folder, name, flags, mode), error = errno;
    if (fd >= 0 && !existed) note_path("C", path, inode_of(fd));
    else if (fd >= 0 && (flags & O_TRUNC)) {
        char line[64];
        snprintf(line, sizeof line, "T\t%llu\t0\n", (unsigned long long)info.st_ino);
        note(line, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags | O_LARGEFILE, mode); }

static int truncated(int fd, off_t size) {
    char path[PATH_MAX], line[64];
    if (!root_length || !path_of(fd, path)) return (int)syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_ftruncate, fd, size), error = errno;
    snprintf(line, sizeof line, "T\t%llu\t%lld\n", (unsigned long long)inode_of(fd), (long long)size);
    if (!result) note(line, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncated(fd, size); }

static int removed(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    int inner = resolve(folder, name, path);
    if (inner) pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_unlinkat, folder, name, flags), error = errno;
    if (inner && !result) note_path("U", path, 0);
    if (inner) pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }
int unlinkat(int folder, const char *name, int flags) { return removed(folder, name, flags); }

static int made(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    struct stat info;
    int inner = resolve(folder, name, path);
    if (inner) pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_mkdirat, folder, name, mode), error = errno;
    if (inner && !result && !fstatat(folder, name, &info, 0)) note_path("D", path, info.st_ino);
    if (inner) pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int mkdir(const char *name, mode_t mode) { return made(AT_FDCWD, name, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return made(folder, name, mode); }

static int linked(int from, const char *old, int to, const char *new, int flags) {
    char source[PATH_MAX], target[PATH_MAX], line[2 * PATH_MAX + 8];
    int inner = resolve(from, old, source) & resolve(to, new, target);
    if (inner) pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_linkat, from, old, to, new, flags), error = errno;
    snprintf(line, sizeof line, "L\t%s\t%s\n", inner ? inside(source) : "", inner ? inside(target) : "");
    if (inner && !result) note(line, NULL, 0);
    if (inner) pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int link(const char *old, const char *new) { return linked(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int a, const char *old, int b, const char *new, int flags) { return linked(a, old, b, new, flags); }
