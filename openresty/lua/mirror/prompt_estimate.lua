--- Prompt length in tokens, from the bytes of the request body alone.

local gsub, sub = string.gsub, string.sub

local _M = {}

-- Counting costs about 10 ns a byte; a larger body is judged by its beginning.
_M.SAMPLE_BYTES = 65536

--- ASCII and non-ASCII bytes of `text`. A JSON escape such as \u4f60 counts as the three bytes
-- that the character has in UTF-8.
function _M.count(text)
    local _, escapes = gsub(text, "\\u%x%x%x%x", "")
    local _, non_ascii = gsub(text, "[\128-\255]", "")
    return #text - non_ascii - 6 * escapes, non_ascii + 3 * escapes
end

--- Tokens in a body of `length` bytes that begins with `sample`; a whole number, at least 1.
function _M.tokens(sample, length, policy)
    sample = sub(sample, 1, _M.SAMPLE_BYTES)
    local ascii, non_ascii = _M.count(sample)
    local tokens = ascii * policy.tokens_per_ascii_byte
        + non_ascii * policy.tokens_per_non_ascii_byte
    if #sample > 0 and length > #sample then
        tokens = tokens * length / #sample
    end
    return math.max(1, math.ceil(tokens))
end

return _M
