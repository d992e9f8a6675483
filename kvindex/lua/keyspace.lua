-- Put in front of every script of the index: key names, time, fence.
--
-- All keys of a pool begin with KEYS[1] = "pf:{<pool>}:3:" (not a key itself, but in the pool's
-- slot; 3 is the version of what is described here; the keys of a pool share one hash tag, so a script
-- may compute them). <target> is "<replica>/<dp_rank>"; <id> is "<request_id>#<attempt>".
-- Milliseconds are the server's own clock.
--
--   leases                        ZSET    target -> instant (ms) at which its lease lapses
--   epoch:<target>                STRING  last epoch granted, decimal; outlives the target by a day
--   epochs, slots                 HASH    target -> its current epoch, its inventory
--   next_seqs, reports            HASH    target -> next sequence number (absent: 0), load report
--   reported                      ZSET    target -> number of its report, counted over all targets
--   roster                        HASH    stamp: another whenever a target came, went or changed its
--                                         slot; changes: how often; reports: the last number given
--   layouts                       HASH    target -> "<kind by group>:<margin>|<packed layout>"
--   parts                         SET     "<group>:<tier>" of every part that has a table
--   table:<part>                  HASH    buckets, members; #<slot>: members of that inventory
--   held:<part>:<bucket>          SET     integers of slot and hash, one for each block held
--   last_slot                     STRING  highest slot ever used
--   free                          ZSET    slots that can be used again, by themselves
--   dropped, sweeping             SET     slots whose members are swept later, are swept now
--   swept                         HASH    part -> buckets that the present pass has swept
--   shadows                       ZSET    "<slot>:<token>" -> instant (ms) at which it is given up
--   gateways                      ZSET    gateway -> instant (ms) at which its lease lapses
--   load:<gateway>                HASH    target -> tokens, blocks and requests that it has reserved
--                                         there, 8 bytes each
--   reserving                     HASH    target that has reservations -> instant (ms) at which the
--                                         last of its pending blocks has had its time
--   reservations:<target>         ZSET    id -> instant (ms) of its removal, inf while counted
--   reservation:<target>:<id>     HASH    gateway, tokens, blocks, counted, pending_until, pending
--   pending:<target>              HASH    last 8 bytes of a hash -> the ids of which that block is
--                                         pending there, each behind a byte of 255
--
-- Epochs are nanoseconds: 19 digits, more than a Lua number holds. They stay strings here.
-- Sequence numbers stay below 2^53: at a thousand steps a second that takes 285,000 years.

local PREFIX = KEYS[1]
local EPOCH_MEMORY_S = 86400
local HASH_BYTES = 8
-- Lua passes at most about 8,000 values to one call; ZADD takes two per member.
local CHUNK = 3500

local function key(name, of, id)
  if not of then
    return PREFIX .. name
  elseif not id then
    return PREFIX .. name .. ':' .. of
  end
  return PREFIX .. name .. ':' .. of .. ':' .. id
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Scores are printed in full: a plain tostring() would round milliseconds to 14 digits.
local function integer(number)
  return string.format('%.0f', number)
end

-- Calls `call` with tables of at most CHUNK members, one per 8-byte hash.
local function each_chunk(hashes, call)
  local members = {}
  for position = 1, #hashes, HASH_BYTES do
    members[#members + 1] = string.sub(hashes, position, position + HASH_BYTES - 1)
    if #members == CHUNK then
      call(members)
      members = {}
    end
  end
  if #members > 0 then
    call(members)
  end
end

local function lease_lapses_at(target)
  return tonumber(redis.call('ZSCORE', key('leases'), target) or 0)
end

-- True when `epoch` is the target's current one and its lease has not lapsed.
local function is_current(target, epoch, now)
  return redis.call('HGET', key('epochs'), target) == epoch
    and lease_lapses_at(target) > now
end

local function is_gateway_live(gateway, now)
  return tonumber(redis.call('ZSCORE', key('gateways'), gateway) or 0) > now
end
