// Made by scripts/make_fields.py from kvasir/fields.py: the first members of SampleRow. Included there.
    double dry_multiplier;
    double dry_base;
    double temperature;
    double top_n_sigma;
    double typical_p;
    double top_p;
    double min_p;
    double xtc_probability;
    double xtc_threshold;
    double dynatemp_range;
    double dynatemp_exponent;
    double mirostat_tau;
    double mirostat_eta;
    double adaptive_target;
    double adaptive_decay;
    int64_t repetition_last_n;
    int64_t occurrence_last_n;
    int64_t dry_allowed_length;
    int64_t dry_penalty_last_n;
    float repetition_penalty;
    float frequency_penalty;
    float presence_penalty;
    int32_t top_k;
    int32_t mirostat;
#define KVASIR_SAMPLER_LAYOUT 0x1ecace59
