/* What the benchmark's C programs share: connecting, and dying with a reason. */
#ifndef BENCH_RABBIT_H
#define BENCH_RABBIT_H

#if defined(__has_include) && __has_include(<rabbitmq-c/amqp.h>)
#include <rabbitmq-c/amqp.h>
#include <rabbitmq-c/framing.h>
#include <rabbitmq-c/tcp_socket.h>
#else /* librabbitmq before 0.12 */
#include <amqp.h>
#include <amqp_framing.h>
#include <amqp_tcp_socket.h>
#endif

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

#define CHANNEL 1
#define FRAME_MAX 131072
#define STALL_SECONDS 30 /* nothing from the broker for so long while something is due: give up */

#define DIE(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))

static inline void expect_ok(int status, const char *what) {
  if (status < 0) DIE("%s: %s", what, amqp_error_string2(status));
}

static inline void expect_reply(amqp_rpc_reply_t reply, const char *what) {
  if (reply.reply_type == AMQP_RESPONSE_NORMAL) return;
  if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION) DIE("%s: %s", what, amqp_error_string2(reply.library_error));
  DIE("%s: the broker closed it, method 0x%08X", what, (unsigned)reply.reply.id);
}

static inline double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double cpu_s(void) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* The URL comes by the environment: a password in argv would show in the process list. */
static inline amqp_connection_state_t connect_to_broker(void) {
  const char *given = getenv("BENCH_AMQP_URL");
  if (given == NULL) DIE("BENCH_AMQP_URL is not set");
  char *url = strdup(given);
  struct amqp_connection_info info;
  if (amqp_parse_url(url, &info) != AMQP_STATUS_OK || info.ssl) DIE("BENCH_AMQP_URL is no amqp:// URL");
  amqp_connection_state_t connection = amqp_new_connection();
  amqp_socket_t *socket = amqp_tcp_socket_new(connection);
  if (socket == NULL) DIE("out of memory");
  expect_ok(amqp_socket_open(socket, info.host, info.port), "connect");
  expect_reply(amqp_login(connection, info.vhost, 0, FRAME_MAX, 0, AMQP_SASL_METHOD_PLAIN, info.user, info.password),
               "login");
  amqp_channel_open(connection, CHANNEL);
  expect_reply(amqp_get_rpc_reply(connection), "channel.open");
  free(url);
  return connection;
}

/* Only the orderly close is skipped: by then everything has been counted. */
static inline void disconnect(amqp_connection_state_t connection) {
  amqp_connection_close(connection, AMQP_REPLY_SUCCESS);
  amqp_destroy_connection(connection);
}

static inline void wait_for_socket(amqp_connection_state_t connection, short events) {
  struct pollfd p = {.fd = amqp_get_sockfd(connection), .events = events};
  int ready;
  do ready = poll(&p, 1, STALL_SECONDS * 1000);
  while (ready < 0 && errno == EINTR);
  if (ready <= 0) DIE("nothing from the broker for %d seconds", STALL_SECONDS);
}

/* Takes one frame that has arrived; 0 when there is none. Never waits. */
static inline int take_frame(amqp_connection_state_t connection, amqp_frame_t *frame) {
  static struct timeval nothing = {0, 0};
  int status = amqp_simple_wait_frame_noblock(connection, frame, &nothing);
  if (status == AMQP_STATUS_TIMEOUT) return 0;
  expect_ok(status, "read");
  if (frame->frame_type != AMQP_FRAME_METHOD) return 1;
  if (frame->payload.method.id == AMQP_CHANNEL_CLOSE_METHOD) {
    amqp_channel_close_t *m = frame->payload.method.decoded;
    DIE("channel closed: %d %.*s", m->reply_code, (int)m->reply_text.len, (char *)m->reply_text.bytes);
  }
  if (frame->payload.method.id == AMQP_CONNECTION_CLOSE_METHOD) {
    amqp_connection_close_t *m = frame->payload.method.decoded;
    DIE("connection closed: %d %.*s", m->reply_code, (int)m->reply_text.len, (char *)m->reply_text.bytes);
  }
  return 1;
}

#endif
