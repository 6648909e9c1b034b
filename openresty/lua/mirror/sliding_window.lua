--- Sums over the last `window_s` seconds, in a shared dict that all nginx workers add to.
--
-- Two fixed windows stand for the sliding one: of the sum of the one before, the part counts that
-- still lies within. Adding is one atomic increment, so workers cannot lose each other's.

local floor, max = math.floor, math.max

local _M = {}
local SlidingWindow = {}
SlidingWindow.__index = SlidingWindow

--- `name` keeps windows in one dict apart; `clock` is a function of seconds.
function _M.new(dict, name, window_s, clock)
    local window = { dict = dict, name = name, window_s = window_s, clock = clock, index = -1 }
    return setmetatable(window, SlidingWindow)
end

-- The part of the current fixed window that has passed.
local function elapsed(self)
    local at = self.clock() / self.window_s
    local index = floor(at)
    if index ~= self.index then
        self.index = index
        self.current = self.name .. "|" .. index .. "|"
        self.before = self.name .. "|" .. index - 1 .. "|"
    end
    return at - index
end

--- The sum with `amount` added, and the fixed window that it was added to.
function SlidingWindow:add(key, amount)
    local part = elapsed(self)
    local total = self.dict:incr(self.current .. key, amount, 0, 2 * self.window_s) or amount
    return total + (self.dict:get(self.before .. key) or 0) * (1 - part), self.index
end

--- Take `amount` out of the fixed window `index`; nothing where that is long over.
function SlidingWindow:take_back(key, amount, index)
    self.dict:incr(self.name .. "|" .. index .. "|" .. key, -amount)
end

function SlidingWindow:sum(key)
    local part = elapsed(self)
    local current = self.dict:get(self.current .. key) or 0
    return current + (self.dict:get(self.before .. key) or 0) * (1 - part)
end

--- Seconds until the sum is `level` or less, if nothing is added.
function SlidingWindow:seconds_until(key, level)
    local part = elapsed(self)
    local current = self.dict:get(self.current .. key) or 0
    local before = self.dict:get(self.before .. key) or 0
    if current + before * (1 - part) <= level then
        return 0
    end
    if current <= level then
        return max(0, (1 - (level - current) / before - part) * self.window_s)
    end
    return (1 - part + 1 - max(0, level) / current) * self.window_s
end

return _M
