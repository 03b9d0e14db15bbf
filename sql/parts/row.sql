-- Purpose: the columns of one row `x`, made by raw.sql, as relay/rows.py takes them apart, in this order; part of page, load,
--          reload, due and followers. Times are seconds since 1970, for a driver's datetime refuses what PostgreSQL allows.
--          Where body, headers and `rare` have more than so many bytes together, they stay behind (of a long `rare`
--          all but the time before which the row may not go), and then `size` says how large they are; else it is null.
--          Headers and a `rare` that no message could carry never come: instead of the headers stands how many bytes these are.
--          Rows without headers and `rare`, nearly all, pass few of these conditions.
-- Values:  {body} the payload as bytes, for its type; {texts} the bytes of headers and `rare`, {size} those and the
--          body's, {is_left} whether they are too many; {texts_max} what a message could carry; {rare_max} a short `rare`.
x.ctid::text, x.seq, x.id, x.event_type, x.aggregate_type, x.aggregate_id,
CASE WHEN {is_left} THEN NULL ELSE {body} END AS body,
CASE WHEN {is_left} THEN {size} END AS size,
date_part('epoch', coalesce(x.occurred_at, x.created_at)) AS occurred_at,
date_part('epoch', coalesce(x.created_at, x.occurred_at)) AS created_at,
CASE WHEN x.rare IS NULL THEN NULL WHEN octet_length(x.rare) > {rare_max} AND ({texts} > {texts_max} OR {is_left})
     THEN jsonb_strip_nulls(jsonb_build_object('available_at', date_part('epoch', x.available_at)))::text
     ELSE x.rare END AS rare,
CASE WHEN x.headers IS NULL AND x.rare IS NULL THEN NULL WHEN {texts} > {texts_max} THEN {texts} || ' bytes'
     WHEN {is_left} THEN NULL ELSE x.headers END AS headers,
x.attempts
