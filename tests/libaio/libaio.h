/* The part of libaio's interface that DeepSpeed calls, by the kernel's own calls: in place of libaio-dev. */
#ifndef HF_MEMOPT_TESTS_LIBAIO_H
#define HF_MEMOPT_TESTS_LIBAIO_H

#include <linux/aio_abi.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef aio_context_t io_context_t;

static inline int io_queue_init(int depth, io_context_t* context)
{
    *context = 0;
    return (int)syscall(SYS_io_setup, depth, context);
}

static inline int io_queue_release(io_context_t context) { return (int)syscall(SYS_io_destroy, context); }

static inline int io_submit(io_context_t context, long count, struct iocb** requests)
{
    return (int)syscall(SYS_io_submit, context, count, requests);
}

static inline int io_pgetevents(io_context_t context,
                                long min_count,
                                long max_count,
                                struct io_event* events,
                                struct timespec* timeout,
                                void* signals)
{
    return (int)syscall(SYS_io_pgetevents, context, min_count, max_count, events, timeout, signals);
}

static inline void hf_memopt_request(struct iocb* request, int kind, int file, void* bytes, size_t count, off_t offset)
{
    memset(request, 0, sizeof(*request));
    request->aio_lio_opcode = kind;
    request->aio_fildes = file;
    request->aio_buf = (__u64)bytes;
    request->aio_nbytes = count;
    request->aio_offset = offset;
}

static inline void io_prep_pread(struct iocb* request, int file, void* bytes, size_t count, off_t offset)
{
    hf_memopt_request(request, IOCB_CMD_PREAD, file, bytes, count, offset);
}

static inline void io_prep_pwrite(struct iocb* request, int file, void* bytes, size_t count, off_t offset)
{
    hf_memopt_request(request, IOCB_CMD_PWRITE, file, bytes, count, offset);
}

#endif
