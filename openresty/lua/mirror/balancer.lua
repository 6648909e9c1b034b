--- Least in flight over the gateways' sockets.
--
-- Counts lie in a shared dict, by peer, so all nginx workers see them. Each worker also counts
-- what it holds itself: when one is killed, the next to start gives that back. Between the look
-- and the increment another worker may pick the same peer; the count is then off by one for the
-- choice, never for the release.

local _M = {}
local Balancer = {}
Balancer.__index = Balancer

_M.MAX_TRIES = 3
_M.DOWN_S = 1

--- `peers` are addresses as `unix:/run/m/gateway-0.sock`, at least one; `flight` a shared dict;
-- `pid` a function that returns the id of this nginx worker.
function _M.new(peers, flight, pid)
    return setmetatable({ peers = peers, flight = flight, pid = pid, turn = 0 }, Balancer)
end

--- Requests that `peer` is answering.
function Balancer:in_flight(peer)
    return self.flight:get("flight|" .. peer) or 0
end

local function contains(list, item)
    for _, other in ipairs(list or {}) do
        if other == item then
            return true
        end
    end
    return false
end

--- The best peer: not `tried` (a list) before not failed lately before fewest in flight; ties
-- take turns.
function Balancer:pick(tried)
    local count = #self.peers
    self.turn = self.turn % count + 1
    local best, best_rank
    for offset = 0, count - 1 do
        local peer = self.peers[(self.turn + offset - 1) % count + 1]
        local rank = self:in_flight(peer)
        if self.flight:get("down|" .. peer) then
            rank = rank + 1e9
        end
        if contains(tried, peer) then
            rank = rank + 1e12
        end
        if best == nil or rank < best_rank then
            best, best_rank = peer, rank
        end
    end
    return best
end

local function add(self, peer, difference)
    self.flight:incr("flight|" .. peer, difference, 0)
    self.flight:incr("held|" .. self.pid() .. "|" .. peer, difference, 0)
end

function Balancer:acquire(peer)
    add(self, peer, 1)
end

function Balancer:release(peer)
    add(self, peer, -1)
end

--- Others come first for `DOWN_S` seconds.
function Balancer:fail(peer)
    self.flight:set("down|" .. peer, true, _M.DOWN_S)
end

--- How often a request may be sent again. With one peer too: it may just have come back, and a
-- kept connection may have gone stale.
function Balancer:retries()
    return math.min(_M.MAX_TRIES, #self.peers + 1) - 1
end

--- Give back what nginx workers that are gone still hold; `is_alive(pid)` tells.
function Balancer:recover(is_alive)
    for _, key in ipairs(self.flight:get_keys(0)) do
        local pid, peer = key:match("^held|(%d+)|(.+)$")
        if pid and not is_alive(tonumber(pid)) then
            -- Two workers may start at once: whoever adds the mark does the work.
            if self.flight:add("recovered|" .. key, true, 60) then
                self.flight:incr("flight|" .. peer, -(self.flight:get(key) or 0), 0)
                self.flight:delete(key)
            end
        end
    end
end

return _M
