// The execution of instructions, and the state of the run that they belong to.
#pragma once

#include "program.h"

namespace kvasir {

// The state of one run. Each thread has its own copy.
struct Run {
    Program* program;
    int64_t rows;                 // token rows
    int64_t chosen, chosen_first;  // rows of the chosen section, and their offset in program->chosen
    int64_t num_pieces;
    int64_t sampling;  // how many of all chosen rows, from the first on, are sampled
};

// Executes one instruction over `rows` rows; all threads of the team call it.
void run_instr(const Instr& in, const Run& run, int64_t rows, const Team& team);

}  // namespace kvasir
