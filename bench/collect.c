/* Empties a queue and writes one message id a line: the proof that a run lost nothing.
 *
 *   BENCH_AMQP_URL=amqp://… collect QUEUE
 *
 * Takes as many messages as the queue says it holds when the program starts; only ever used on a queue that nobody
 * publishes to any more. Exit 1 with a reason when the broker refuses, closes or falls silent before that. */
#include "rabbit.h"

int main(int argc, char **argv) {
  if (argc != 2) DIE("usage: %s QUEUE", argv[0]);
  amqp_connection_state_t c = connect_to_broker();
  amqp_bytes_t queue = amqp_cstring_bytes(argv[1]);
  amqp_queue_declare_ok_t *ok = amqp_queue_declare(c, CHANNEL, queue, 1, 0, 0, 0, amqp_empty_table);
  expect_reply(amqp_get_rpc_reply(c), "queue.declare");
  uint64_t due = ok->message_count, taken = 0;
  amqp_basic_consume(c, CHANNEL, queue, amqp_empty_bytes, 0, 1, 0, amqp_empty_table);
  expect_reply(amqp_get_rpc_reply(c), "basic.consume");
  while (taken < due) {
    amqp_frame_t frame;
    if (!take_frame(c, &frame)) {
      wait_for_socket(c, POLLIN);
      continue;
    }
    if (frame.frame_type == AMQP_FRAME_HEADER) {
      amqp_basic_properties_t *p = frame.payload.properties.decoded;
      if (!(p->_flags & AMQP_BASIC_MESSAGE_ID_FLAG)) DIE("a message without message_id");
      fwrite(p->message_id.bytes, 1, p->message_id.len, stdout);
      fputc('\n', stdout);
      taken++;
    }
    amqp_maybe_release_buffers(c);
  }
  disconnect(c);
  return fflush(stdout) == 0 ? 0 : 1;
}
