// The entry of the extension `mirror_sd._native`; each part binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_sampling(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_draft(nb::module_& m);
void bind_bandwidth(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "The C++ part of mirror_sd: sampling, the decoder and its draft head.";
#ifdef NDEBUG
    nb::set_leak_warnings(false);
#endif
    bind_sampling(m);
    bind_decoder(m);
    bind_draft(m);
    bind_bandwidth(m);
}
