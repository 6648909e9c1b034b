local edge = require("mirror.edge")
local ngx = ngx

local LOOK_S = 1

local function is_alive(pid)
    local file = io.open("/proc/" .. pid .. "/stat")
    if file then
        file:close()
    end
    return file ~= nil
end

local function reload(part, name)
    local is_loaded, reason = part:reload()
    if is_loaded then
        ngx.log(ngx.NOTICE, name, " read again")
    elseif is_loaded == nil then
        ngx.log(ngx.ERR, reason)
        edge.metrics:add("mirror_edge_documents_refused_total|" .. name, 1)
    end
end

local function look(is_ending)
    if is_ending then
        return
    end
    reload(edge.auth, "keys")
    -- Keys are each worker's own; the policy is shared, so one worker looks.
    if ngx.worker.id() == 0 then
        reload(edge.policies, "policy")
    end
end

return function()
    edge.retirement:begin()
    edge.flight:recover(is_alive)
    local is_set, reason = ngx.timer.every(LOOK_S, look)
    if not is_set then
        ngx.log(ngx.ERR, "keys and policy are not read again: ", reason)
    end
end
