// C interface of the k-anonymity filter, for tandem_drafting.k_anonymity.

#include "k_anonymity.h"

extern "C" {

void* tandem_k_anonymity_new(int32_t k) { return new KAnonymityFilter(k); }
void tandem_k_anonymity_free(void* filter) { delete static_cast<KAnonymityFilter*>(filter); }

// `spans` needs room for three numbers per token and three more: begin, end, supporter.
int32_t tandem_k_anonymity_append(void* filter, int32_t run, uint64_t request, const int32_t* tokens, int64_t count,
                               int32_t* spans) {
  return static_cast<KAnonymityFilter*>(filter)->append(run, request, tokens, count,
                                                  reinterpret_cast<KAnonymityFilter::SharedSpan*>(spans));
}

void tandem_k_anonymity_restore(void* filter, int32_t run, uint64_t request, const int32_t* tokens, int64_t count,
                             int32_t last_begin, int32_t last_end) {
  static_cast<KAnonymityFilter*>(filter)->restore(run, request, tokens, count, {last_begin, last_end, -1});
}

void tandem_k_anonymity_drop(void* filter, int32_t run) { static_cast<KAnonymityFilter*>(filter)->drop(run); }

void tandem_k_anonymity_read(void* filter, int32_t run, int64_t begin, int64_t end, int32_t* tokens) {
  static_cast<KAnonymityFilter*>(filter)->read(run, begin, end, tokens);
}

int64_t tandem_k_anonymity_bytes(void* filter) { return static_cast<KAnonymityFilter*>(filter)->bytes(); }
}
