--- Sums over the last `window_s` seconds, in a shared dict that all nginx workers add to.
--
-- The window is cut into parts with a sum each; of the oldest part that it still touches, as much
-- counts as lies within. Adding is one atomic increment, so workers cannot lose each other's.

local floor, max = math.floor, math.max

local _M = {}
local SlidingWindow = {}
SlidingWindow.__index = SlidingWindow

--- `name` keeps windows in one dict apart; a window has `parts` parts; `clock` is a function of
-- seconds.
function _M.new(dict, name, window_s, parts, clock)
    return setmetatable({
        dict = dict,
        name = name,
        parts = parts,
        part_s = window_s / parts,
        clock = clock,
        index = -1,
        prefixes = {},
    }, SlidingWindow)
end

-- How much of the current part has passed.
local function elapsed(self)
    local at = self.clock() / self.part_s
    local index = floor(at)
    if index ~= self.index then
        self.index = index
        for back = 0, self.parts do
            self.prefixes[back] = self.name .. "|" .. index - back .. "|"
        end
    end
    return at - index
end

local function part(self, back, key)
    return self.dict:get(self.prefixes[back] .. key) or 0
end

-- The sum of what the parts before the current one still count for.
local function earlier(self, key, passed)
    local total = part(self, self.parts, key) * (1 - passed)
    for back = 1, self.parts - 1 do
        total = total + part(self, back, key)
    end
    return total
end

--- The sum with `amount` added, and the index of the part that it was added to.
function SlidingWindow:add(key, amount)
    local passed = elapsed(self)
    local ttl_s = (self.parts + 1) * self.part_s
    local current = self.dict:incr(self.prefixes[0] .. key, amount, 0, ttl_s) or amount
    return current + earlier(self, key, passed), self.index
end

--- Take `amount` out of the part `index`; nothing where that is long over.
function SlidingWindow:take_back(key, amount, index)
    self.dict:incr(self.name .. "|" .. index .. "|" .. key, -amount)
end

function SlidingWindow:sum(key)
    local passed = elapsed(self)
    return part(self, 0, key) + earlier(self, key, passed)
end

--- Seconds until the sum is `level` or less, if nothing is added.
function SlidingWindow:seconds_until(key, level)
    local left = 1 - elapsed(self)
    local newest = part(self, 0, key)
    if level <= 0 and newest > 0 then
        return (self.parts + left) * self.part_s
    end
    local total, waited = newest + earlier(self, key, 1 - left), 0
    for back = self.parts, 0, -1 do
        if total <= level then
            break
        end
        local amount = part(self, back, key)
        if total - amount * left <= level then
            return max(0, (waited + (total - level) / amount) * self.part_s)
        end
        total = total - amount * left
        waited, left = waited + left, 1
    end
    return waited * self.part_s
end

return _M
