// SPDX-License-Identifier: Apache-2.0
// The same with the communicator over MPI, which is another library.
#include <cstdio>

#include "winnow/mpi.h"
#include "winnow/winnow.h"

int main() {
  try {
    winnow::mpi_communicator(nullptr);
  } catch (const winnow::Error& error) {
    std::printf("%s\n", error.what());
    return 0;
  }
  return 1;
}
