// The promoter's C interface, for tandem_drafting.native.

#include "promoter.h"

extern "C" {

void* tandem_promoter_new(int32_t k) { return new Promoter(k); }
void tandem_promoter_free(void* promoter) { delete static_cast<Promoter*>(promoter); }

// `stretches` has room for three numbers a token and three more: begin, end, supporter.
int32_t tandem_promoter_append(void* promoter, int32_t run, uint64_t request, const int32_t* tokens, int64_t count,
                               int32_t* stretches) {
  return static_cast<Promoter*>(promoter)->append(run, request, tokens, count,
                                                  reinterpret_cast<Promoter::Stretch*>(stretches));
}

void tandem_promoter_restore(void* promoter, int32_t run, uint64_t request, const int32_t* tokens, int64_t count,
                             int32_t last_begin, int32_t last_end) {
  static_cast<Promoter*>(promoter)->restore(run, request, tokens, count, {last_begin, last_end, -1});
}

void tandem_promoter_drop(void* promoter, int32_t run) { static_cast<Promoter*>(promoter)->drop(run); }

void tandem_promoter_read(void* promoter, int32_t run, int64_t begin, int64_t end, int32_t* tokens) {
  static_cast<Promoter*>(promoter)->read(run, begin, end, tokens);
}

int64_t tandem_promoter_bytes(void* promoter) { return static_cast<Promoter*>(promoter)->bytes(); }
}
