/* A consumer that says when each message came: the other end of a latency.
 *
 *   BENCH_AMQP_URL=amqp://… consume QUEUE
 *
 * Prints `ready` when it consumes, then `MESSAGE_ID SECONDS` (Unix time) a line, until SIGTERM and a silence: exit 0. Exit 1 with a reason
 * when the broker refuses or closes. It acknowledges nothing (no-ack): what it measures is the arrival. */
#include "rabbit.h"

#include <signal.h>

#define LOOK_MS 100 /* the silence */

static volatile sig_atomic_t is_ending = 0;

static void on_term(int number) {
  (void)number;
  is_ending = 1;
}

int main(int argc, char **argv) {
  if (argc != 2) DIE("usage: %s QUEUE", argv[0]);
  static char room[1 << 20];
  setvbuf(stdout, room, _IOFBF, sizeof room);
  signal(SIGTERM, on_term);
  amqp_connection_state_t c = connect_to_broker();
  amqp_basic_consume(c, CHANNEL, amqp_cstring_bytes(argv[1]), amqp_empty_bytes, 0, 1, 0, amqp_empty_table);
  expect_reply(amqp_get_rpc_reply(c), "basic.consume");
  printf("ready\n");
  fflush(stdout);
  for (;;) {
    amqp_frame_t frame;
    if (!take_frame(c, &frame)) {
      struct pollfd p = {.fd = amqp_get_sockfd(c), .events = POLLIN};
      int ready = poll(&p, 1, LOOK_MS);
      if (ready < 0 && errno != EINTR) DIE("poll: %s", strerror(errno));
      if (ready == 0 && is_ending) break; /* what was on its way has come */
      continue;
    }
    if (frame.frame_type == AMQP_FRAME_HEADER) {
      struct timespec t;
      clock_gettime(CLOCK_REALTIME, &t);
      amqp_basic_properties_t *p = frame.payload.properties.decoded;
      if (!(p->_flags & AMQP_BASIC_MESSAGE_ID_FLAG)) DIE("a message without message_id");
      printf("%.*s %lld.%06ld\n", (int)p->message_id.len, (char *)p->message_id.bytes, (long long)t.tv_sec,
             t.tv_nsec / 1000);
    }
    amqp_maybe_release_buffers(c);
  }
  disconnect(c);
  return fflush(stdout) == 0 ? 0 : 1;
}
