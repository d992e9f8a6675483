-- Open a new epoch of a target with an empty inventory.
-- ARGV: target, boot_ns (decimal), lease_ms, empty report, layout or "". Returns the epoch
-- (decimal). Writes epoch:, epochs, slots, reports, reported, layouts, leases, roster; drops what the
-- target held and had reserved.

local target, boot_ns, lease_ms, report, layout =
  ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]

local function is_less(left, right)
  if #left ~= #right then
    return #left < #right
  end
  return left < right
end

local function successor(decimal)
  local head, tail = string.match(decimal, '^(%d-)(9*)$')
  if head == '' then
    return '1' .. string.rep('0', #tail)
  end
  local digit = tonumber(string.sub(head, -1)) + 1
  return string.sub(head, 1, -2) .. digit .. string.rep('0', #tail)
end

local stored = redis.call('GET', key('epoch', target))
local epoch = boot_ns
if stored and is_less(epoch, successor(stored)) then
  epoch = successor(stored)
end
local now = now_ms()
drop_target(target)
redis.call('SET', key('epoch', target), epoch)
redis.call('HSET', key('epochs'), target, epoch)
slot_give(target, slot_open())
report_take(target, report)
if layout ~= '' then
  redis.call('HSET', key('layouts'), target, layout)
end
redis.call('ZADD', key('leases'), integer(now + lease_ms), target)
reclaim(now, 4)
return epoch
