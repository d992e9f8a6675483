-- Stop counting the prefill tokens of a reservation; what is unknown changes nothing.
-- ARGV: target, id. Writes load:, reservation:.

uncount_tokens(ARGV[1], reservation_key(ARGV[1], ARGV[2]))
return 1
