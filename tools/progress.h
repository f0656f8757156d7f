// SPDX-License-Identifier: Apache-2.0
// Progress: a bar on stderr while something takes longer than a second, with the time that is left;
// nothing where stderr is no terminal.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace winnow::tools {

class Progress {
 public:
  /// `total` is the work in any unit that `begin` counts in.
  explicit Progress(double total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// What was begun before is done; `what` begins, a part of `work`. Throws Interrupted after
  /// Ctrl-C.
  void begin(std::string_view what, double work = 1);
  /// Text for stdout, with the bar out of its way.
  void print(std::string_view text);

 private:
  void draw();
  void erase();
  std::string time_left() const;

  double total_;
  double done_ = 0;
  double work_ = 0;  // of what runs now
  std::string what_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point part_start_ = start_;
  std::mutex mutex_;  // of all of the above: the thread redraws
  std::condition_variable_any wake_;
  std::jthread thread_;
};

}  // namespace winnow::tools
