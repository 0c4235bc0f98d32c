/* hold: keep a container of any image alive (link it statically).
 *
 *   hold                    wait for SIGTERM or SIGINT, and reap orphaned processes
 *   hold --install PATH     copy this program to PATH
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int install(const char *path) {
    char buffer[65536];
    ssize_t count;
    int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    int to = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);
    if (from < 0 || to < 0) {
        fprintf(stderr, "hold: cannot copy itself to %s: %s\n", path, strerror(errno));
        return 1;
    }
    while ((count = read(from, buffer, sizeof buffer)) > 0) {
        for (ssize_t done = 0; done < count;) {
            ssize_t written = write(to, buffer + done, (size_t)(count - done));
            if (written < 0) {
                fprintf(stderr, "hold: cannot write %s: %s\n", path, strerror(errno));
                return 1;
            }
            done += written;
        }
    }
    if (count < 0 || fchmod(to, 0755) < 0 || close(to) < 0) {
        fprintf(stderr, "hold: cannot finish %s: %s\n", path, strerror(errno));
        return 1;
    }
    return 0;
}


int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--install") == 0)
        return install(argv[2]);
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGTERM);
    sigaddset(&wanted, SIGINT);
    sigaddset(&wanted, SIGCHLD);
    sigprocmask(SIG_BLOCK, &wanted, NULL);
    for (;;) {
        int number = 0;
        if (sigwait(&wanted, &number) != 0)
            continue;
        if (number != SIGCHLD)
            return 0;
        while (waitpid(-1, NULL, WNOHANG) > 0) {
        }
    }
}
