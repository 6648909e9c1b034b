--- Just enough of ngx for modules that are tested outside nginx.

local _M = {}

local Dict = {}
Dict.__index = Dict

--- A shared dict; `clock` is a function of seconds, `limit` the most keys that it has room for.
function _M.dict(clock, limit)
    return setmetatable({ values = {}, clock = clock, limit = limit or math.huge }, Dict)
end

local function has_room(self)
    local count = 0
    for _ in pairs(self.values) do
        count = count + 1
    end
    return count < self.limit
end

function Dict:get(key)
    local entry = self.values[key]
    if entry and entry.expires and entry.expires <= self.clock() then
        self.values[key] = nil
        return nil
    end
    return entry and entry.value
end

function Dict:set(key, value, ttl)
    self.values[key] = { value = value, expires = ttl and ttl > 0 and self.clock() + ttl or nil }
    return true
end

function Dict:safe_set(key, value, ttl)
    if self.values[key] == nil and not has_room(self) then
        return nil, "no memory"
    end
    return self:set(key, value, ttl)
end

function Dict:add(key, value, ttl)
    if self:get(key) ~= nil then
        return false, "exists"
    end
    return self:set(key, value, ttl)
end

function Dict:incr(key, difference, initial, ttl)
    local value = self:get(key)
    local expires = self.values[key] and self.values[key].expires
    if value == nil then
        if initial == nil then
            return nil, "not found"
        end
        if not has_room(self) then
            return nil, "no memory"
        end
        value = initial
        expires = ttl and ttl > 0 and self.clock() + ttl or nil
    end
    self.values[key] = { value = value + difference, expires = expires }
    return value + difference
end

function Dict:delete(key)
    self.values[key] = nil
end

function Dict:get_keys()
    local keys = {}
    for key in pairs(self.values) do
        keys[#keys + 1] = key
    end
    return keys
end

--- `ngx` at second 1000; `ngx.advance(seconds)` moves its clock.
function _M.new()
    local now = 1000
    local ngx = { ctx = {}, var = {}, header = {}, req = {}, log_lines = {}, printed = {} }
    ngx.now = function()
        return now
    end
    ngx.advance = function(seconds)
        now = now + seconds
    end
    ngx.shared = {}
    for _, name in ipairs({ "flight", "metrics", "control", "usage" }) do
        ngx.shared["mirror_" .. name] = _M.dict(ngx.now)
    end
    ngx.worker = {
        pid = function()
            return 41
        end,
        id = function()
            return 0
        end,
    }
    ngx.ERR, ngx.WARN, ngx.NOTICE, ngx.HTTP_OK = 4, 5, 6, 200
    ngx.log = function(...)
        ngx.log_lines[#ngx.log_lines + 1] = table.concat({ ... })
    end
    ngx.print = function(...)
        ngx.printed[#ngx.printed + 1] = table.concat({ ... })
    end
    ngx.exit = function(status)
        ngx.exited = status
    end
    --- A new request: modules keep the table `ngx`, so it is emptied and not replaced.
    ngx.begin = function(var)
        ngx.ctx, ngx.var, ngx.header, ngx.printed, ngx.exited = {}, var or {}, {}, {}, nil
        ngx.status = 200
        ngx.req.discard_body = function()
            ngx.ctx.is_body_discarded = true
        end
    end
    return ngx
end

return _M
