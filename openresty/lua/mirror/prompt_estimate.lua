--- Prompt length in tokens, from the bytes of the request body alone.

local find, gsub, match, sub = string.find, string.gsub, string.match, string.sub
local ceil, max = math.ceil, math.max

local _M = {}

-- Counting costs about 10 ns a byte; a larger body is judged by its beginning.
_M.SAMPLE_BYTES = 65536

--- ASCII and non-ASCII bytes of `text`. A JSON escape such as \u4f60 counts as the three bytes
-- that the character has in UTF-8.
function _M.count(text)
    local escapes, non_ascii = 0, 0
    if find(text, "\\u", 1, true) then
        escapes = select(2, gsub(text, "\\u%x%x%x%x", ""))
    end
    if find(text, "[\128-\255]") then
        non_ascii = select(2, gsub(text, "[\128-\255]", ""))
    end
    return #text - non_ascii - 6 * escapes, non_ascii + 3 * escapes
end

--- The same for a body of `length` bytes that begins with `sample`.
function _M.bytes(sample, length)
    sample = sub(sample, 1, _M.SAMPLE_BYTES)
    local ascii, non_ascii = _M.count(sample)
    if #sample > 0 and length > #sample then
        local scale = length / #sample
        return ascii * scale, non_ascii * scale
    end
    return ascii, non_ascii
end

--- Tokens of so many bytes at these rates; a whole number, at least 1.
function _M.tokens(ascii, non_ascii, per_ascii, per_non_ascii)
    return max(1, ceil(ascii * per_ascii + non_ascii * per_non_ascii))
end

--- The model that a body asks for, or nil where its beginning does not say. In a JSON string the
-- quotes would be escaped, so this is the key.
function _M.model(sample)
    local at = find(sample, '"model"', 1, true)
    return at and match(sample, '^"model"%s*:%s*"([^"\\]+)"', at)
end

return _M
