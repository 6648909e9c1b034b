local edge = require("mirror.edge")
local errors = require("mirror.errors")
local read = require("mirror.phase.read")
local ngx = ngx

--- The caller; a request without a good key ends here.
return function()
    read()
    local caller, name = edge.auth:caller(ngx.var.http_authorization)
    if not caller then
        edge.metrics:add("mirror_edge_refusals_total|" .. name, 1)
        return errors.refuse(name)
    end
    ngx.ctx.identity = caller
    return caller
end
