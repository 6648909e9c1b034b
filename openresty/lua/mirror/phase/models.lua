local edge = require("mirror.edge")
local identify = require("mirror.phase.identify")
local ngx = ngx

--- `is_last`: the connection is closed after this answer.
return function(is_last)
    if not is_last and edge.retirement:is_due() then
        return ngx.exec("@last_models")
    end
    return identify()
end
