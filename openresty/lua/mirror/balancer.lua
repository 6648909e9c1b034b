--- Least in flight over the gateways' sockets.
--
-- All nginx workers see the counts. Between the look and the increment another worker may pick the
-- same peer; the count is then off by one for the choice, never for the release.

local _M = {}
local Balancer = {}
Balancer.__index = Balancer

_M.MAX_TRIES = 3
_M.DOWN_S = 1

--- `peers` are addresses as `unix:/run/m/gateway-0.sock`, at least one; `flight` an `InFlight`;
-- `dict` a shared dict, which keeps the peers that failed.
function _M.new(peers, flight, dict)
    return setmetatable({ peers = peers, flight = flight, dict = dict, turn = 0 }, Balancer)
end

--- Requests that `peer` is answering.
function Balancer:in_flight(peer)
    return self.flight:count(peer)
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
        if self.dict:get("down|" .. peer) then
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

function Balancer:acquire(peer)
    self.flight:add(peer, 1)
end

function Balancer:release(peer)
    self.flight:add(peer, -1)
end

--- Others come first for `DOWN_S` seconds.
function Balancer:fail(peer)
    self.dict:set("down|" .. peer, true, _M.DOWN_S)
end

--- How often a request may be sent again. With one peer too: it may just have come back, and a
-- kept connection may have gone stale.
function Balancer:retries()
    return math.min(_M.MAX_TRIES, #self.peers + 1) - 1
end

return _M
