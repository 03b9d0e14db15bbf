/* The ceiling: how fast a C publisher gets confirms for the messages that the relay sends.
 *
 *   BENCH_AMQP_URL=amqp://… ceiling EXCHANGE MESSAGES BODY_FILE KEYS WINDOW buffer|library
 *
 * One message is what the relay makes of one row of the benchmark (docs/benchmarks.md): the body of BODY_FILE, mandatory,
 * persistent, with message_id, type, timestamp, content_type and the four headers. At most WINDOW are unconfirmed.
 * `library` calls amqp_basic_publish for each (three writes to the socket); `buffer` has librabbitmq encode the frames,
 * joins them, and writes as many as the window has room for at once. Neither waits for confirms while there is room.
 * Prints one JSON line; exit 1 with a reason when the broker refuses, closes or falls silent. */
#include "rabbit.h"

#define UUID_LENGTH 36
#define BUFFER_MAX (64 * 1024) /* joined frames: some 120 messages a write, so that the broker never waits for the next */
#define BATCH_MAX 64           /* `library`: messages between two looks for confirms */

enum outcome { OPEN = 0, ACKED, NACKED };

/* I1: settled <= sent. I2: every tag below `low` has an outcome. I3: each tag gets one outcome, once. */
struct window {
  uint8_t *outcome; /* by delivery tag */
  uint64_t sent, settled, low;
  uint64_t acked, nacked, returned, confirms, multiple;
};

static void settle(struct window *w, uint64_t tag, int is_multiple, enum outcome outcome) {
  if (tag == 0 || tag > w->sent) DIE("confirm of delivery tag %llu, which was never sent", (unsigned long long)tag);
  w->confirms++;
  w->multiple += is_multiple ? 1 : 0;
  for (uint64_t t = is_multiple ? w->low : tag; t <= tag; t++) {
    if (w->outcome[t] != OPEN) continue;
    w->outcome[t] = (uint8_t)outcome;
    w->settled++;
    if (outcome == ACKED) w->acked++;
    else w->nacked++;
  }
  while (w->low <= w->sent && w->outcome[w->low] != OPEN) w->low++;
}

static void take_confirms(amqp_connection_state_t connection, struct window *w) {
  amqp_frame_t frame;
  while (take_frame(connection, &frame)) {
    if (frame.frame_type != AMQP_FRAME_METHOD) continue; /* a returned message's header and body */
    switch (frame.payload.method.id) {
      case AMQP_BASIC_ACK_METHOD: {
        amqp_basic_ack_t *m = frame.payload.method.decoded;
        settle(w, m->delivery_tag, m->multiple, ACKED);
        break;
      }
      case AMQP_BASIC_NACK_METHOD: {
        amqp_basic_nack_t *m = frame.payload.method.decoded;
        settle(w, m->delivery_tag, m->multiple, NACKED);
        break;
      }
      case AMQP_BASIC_RETURN_METHOD:
        w->returned++;
        break;
      case AMQP_CONNECTION_BLOCKED_METHOD:
        DIE("the broker blocks publishers: no ceiling to measure");
      default:
        DIE("unexpected method 0x%08X", (unsigned)frame.payload.method.id);
    }
  }
  amqp_maybe_release_buffers(connection);
}

/* ---- the message */

struct message {
  char uuid[UUID_LENGTH + 1], key[32], occurred_at[64];
  amqp_table_entry_t headers[4];
  amqp_basic_properties_t properties;
  amqp_bytes_t exchange, routing_key, body;
};

static amqp_table_entry_t text_header(const char *name, char *value) {
  amqp_table_entry_t entry = {.key = amqp_cstring_bytes(name)};
  entry.value.kind = AMQP_FIELD_KIND_UTF8;
  entry.value.value.bytes = amqp_cstring_bytes(value);
  return entry;
}

static void prepare(struct message *m, const char *exchange, amqp_bytes_t body) {
  struct timespec t;
  struct tm utc;
  char seconds[24];
  clock_gettime(CLOCK_REALTIME, &t);
  gmtime_r(&t.tv_sec, &utc);
  strftime(seconds, sizeof seconds, "%Y-%m-%dT%H:%M:%S", &utc);
  snprintf(m->occurred_at, sizeof m->occurred_at, "%s.%06ld+00:00", seconds, t.tv_nsec / 1000);
  m->headers[0] = text_header("aggregate_type", "customer");
  m->headers[2] = (amqp_table_entry_t){.key = amqp_cstring_bytes("schema_version")};
  m->headers[2].value.kind = AMQP_FIELD_KIND_I64;
  m->headers[2].value.value.i64 = 1;
  m->headers[3] = text_header("occurred_at", m->occurred_at);
  m->properties = (amqp_basic_properties_t){
      ._flags = AMQP_BASIC_MESSAGE_ID_FLAG | AMQP_BASIC_TYPE_FLAG | AMQP_BASIC_TIMESTAMP_FLAG |
                AMQP_BASIC_CONTENT_TYPE_FLAG | AMQP_BASIC_DELIVERY_MODE_FLAG | AMQP_BASIC_HEADERS_FLAG,
      .content_type = amqp_cstring_bytes("application/json"),
      .delivery_mode = AMQP_DELIVERY_PERSISTENT,
      .timestamp = (uint64_t)t.tv_sec,
      .type = amqp_cstring_bytes("order.created"),
      .headers = {.num_entries = 4, .entries = m->headers},
  };
  m->exchange = amqp_cstring_bytes(exchange);
  m->routing_key = amqp_cstring_bytes("order.created");
  m->body = body;
}

/* Ids differ from run to run and message to message; a xorshift does for a benchmark. */
static void identify(struct message *m, uint64_t keys) {
  static uint64_t state = 0;
  static const char digits[] = "0123456789abcdef";
  if (state == 0) state = ((uint64_t)time(NULL) << 20) ^ (uint64_t)now_s() ^ 0x9E3779B97F4A7C15ull;
  for (int i = 0; i < UUID_LENGTH; i++) {
    if (i % 12 == 0) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
    }
    int is_dash = i == 8 || i == 13 || i == 18 || i == 23;
    m->uuid[i] = is_dash ? '-' : i == 14 ? '4' : digits[(state >> (i % 12 * 4)) & 15];
  }
  m->uuid[UUID_LENGTH] = '\0';
  snprintf(m->key, sizeof m->key, "c-%llu", (unsigned long long)(state % keys));
  m->properties.message_id = amqp_cstring_bytes(m->uuid);
  m->headers[1] = text_header("aggregate_id", m->key);
}

/* ---- frames, AMQP 0-9-1 section 4.2.3: type, channel, length, payload, 0xCE */

static size_t finish_frame(uint8_t *frame, uint8_t type, size_t length) {
  frame[0] = type;
  frame[1] = CHANNEL >> 8;
  frame[2] = CHANNEL & 255;
  for (int i = 0; i < 4; i++) frame[3 + i] = (uint8_t)(length >> (24 - 8 * i));
  frame[7 + length] = 0xCE;
  return length + 8;
}

static size_t encode(const struct message *m, uint8_t *out, size_t room) {
  size_t used = 0;
  amqp_basic_publish_t publish = {.exchange = m->exchange, .routing_key = m->routing_key, .mandatory = 1};
  uint32_t method = AMQP_BASIC_PUBLISH_METHOD;
  for (int i = 0; i < 4; i++) out[7 + i] = (uint8_t)(method >> (24 - 8 * i));
  int length = amqp_encode_method(method, &publish, (amqp_bytes_t){.len = room - 12, .bytes = out + 11});
  expect_ok(length, "encode basic.publish");
  used += finish_frame(out, AMQP_FRAME_METHOD, 4 + (size_t)length);

  uint8_t *header = out + used;
  memset(header + 7, 0, 12);
  header[7 + 1] = AMQP_BASIC_CLASS;
  for (int i = 0; i < 8; i++) header[7 + 4 + i] = (uint8_t)((uint64_t)m->body.len >> (56 - 8 * i));
  length = amqp_encode_properties(AMQP_BASIC_CLASS, (void *)&m->properties,
                                  (amqp_bytes_t){.len = room - used - 20, .bytes = header + 19});
  expect_ok(length, "encode properties");
  used += finish_frame(header, AMQP_FRAME_HEADER, 12 + (size_t)length);

  memcpy(out + used + 7, m->body.bytes, m->body.len);
  return used + finish_frame(out + used, AMQP_FRAME_BODY, m->body.len);
}

/* ---- publishing */

static void publish_buffered(amqp_connection_state_t c, struct window *w, struct message *m, uint64_t total,
                             uint64_t keys, uint64_t limit) {
  static uint8_t buffer[BUFFER_MAX + 2 * FRAME_MAX];
  size_t filled = 0, written = 0;
  while (w->settled < total) {
    while (w->sent < total && w->sent - w->settled < limit && filled < BUFFER_MAX) {
      identify(m, keys);
      filled += encode(m, buffer + filled, sizeof buffer - filled);
      w->sent++;
    }
    if (written < filled) { /* librabbitmq keeps the socket non-blocking */
      ssize_t n = send(amqp_get_sockfd(c), buffer + written, filled - written, MSG_NOSIGNAL);
      if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) DIE("write: %s", strerror(errno));
      if (n > 0) written += (size_t)n;
      if (written == filled) written = filled = 0;
    }
    uint64_t settled = w->settled;
    take_confirms(c, w);
    int has_room = w->sent < total && w->sent - w->settled < limit && filled < BUFFER_MAX;
    if (settled == w->settled && !has_room && w->settled < total)
      wait_for_socket(c, (short)(POLLIN | (written < filled ? POLLOUT : 0)));
  }
}

static void publish_by_library(amqp_connection_state_t c, struct window *w, struct message *m, uint64_t total,
                               uint64_t keys, uint64_t limit) {
  while (w->settled < total) {
    for (int i = 0; i < BATCH_MAX && w->sent < total && w->sent - w->settled < limit; i++) {
      identify(m, keys);
      expect_ok(amqp_basic_publish(c, CHANNEL, m->exchange, m->routing_key, 1, 0, &m->properties, m->body), "publish");
      w->sent++;
    }
    uint64_t settled = w->settled;
    take_confirms(c, w);
    int has_room = w->sent < total && w->sent - w->settled < limit;
    if (settled == w->settled && !has_room && w->settled < total) wait_for_socket(c, POLLIN);
  }
}

static amqp_bytes_t read_body(const char *path) {
  static char body[FRAME_MAX - 8];
  FILE *file = fopen(path, "rb");
  if (file == NULL) DIE("%s: %s", path, strerror(errno));
  size_t length = fread(body, 1, sizeof body, file);
  if (length == 0 || length == sizeof body) DIE("%s: must hold 1 to %zu bytes", path, sizeof body - 1);
  fclose(file);
  return (amqp_bytes_t){.len = length, .bytes = body};
}

int main(int argc, char **argv) {
  if (argc != 7) DIE("usage: %s EXCHANGE MESSAGES BODY_FILE KEYS WINDOW buffer|library", argv[0]);
  uint64_t total = strtoull(argv[2], NULL, 10), keys = strtoull(argv[4], NULL, 10), limit = strtoull(argv[5], NULL, 10);
  int is_buffered = strcmp(argv[6], "buffer") == 0;
  if (total == 0 || keys == 0 || limit == 0) DIE("MESSAGES, KEYS and WINDOW are positive numbers");
  if (!is_buffered && strcmp(argv[6], "library") != 0) DIE("%s: neither buffer nor library", argv[6]);

  struct window w = {.outcome = calloc(total + 1, 1), .low = 1};
  struct message m;
  if (w.outcome == NULL) DIE("out of memory");
  prepare(&m, argv[1], read_body(argv[3]));
  amqp_connection_state_t c = connect_to_broker();
  amqp_confirm_select(c, CHANNEL);
  expect_reply(amqp_get_rpc_reply(c), "confirm.select");

  double started = now_s(), cpu = cpu_s();
  if (is_buffered) publish_buffered(c, &w, &m, total, keys, limit);
  else publish_by_library(c, &w, &m, total, keys, limit);
  double seconds = now_s() - started;
  cpu = cpu_s() - cpu;
  disconnect(c);

  printf("{\"messages\": %llu, \"body_bytes\": %zu, \"window\": %llu, \"writes\": \"%s\", \"seconds\": %.6f, "
         "\"msgs_per_s\": %.1f, \"cpu_s\": %.6f, \"acked\": %llu, \"nacked\": %llu, \"returned\": %llu, "
         "\"confirms\": %llu, \"multiple\": %llu, \"librabbitmq\": \"%s\"}\n",
         (unsigned long long)total, m.body.len, (unsigned long long)limit, argv[6], seconds, (double)total / seconds, cpu,
         (unsigned long long)w.acked, (unsigned long long)w.nacked, (unsigned long long)w.returned,
         (unsigned long long)w.confirms, (unsigned long long)w.multiple, amqp_version());
  free(w.outcome);
  return 0;
}
