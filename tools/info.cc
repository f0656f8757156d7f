// SPDX-License-Identifier: Apache-2.0
// winnow info: the version, the devices, the backends, and which of them a call takes by itself.
#include <array>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/commands.h"
#include "tools/table.h"
#include "winnow/winnow.h"

namespace winnow::tools {
namespace {

bool usable(Backend backend) { return why_not(backend).empty(); }

struct Place {
  std::string device;
  std::string what;
  Backend automatic;  // what Backend::automatic takes for tensors there
};

std::vector<Place> places() {
  std::vector<Place> result{{"cpu", fmt::format("{} threads", std::thread::hardware_concurrency()),
                             usable(Backend::cpu) ? Backend::cpu : Backend::reference}};
  if (usable(Backend::cuda)) result.push_back({"cuda", describe(Backend::cuda), Backend::cuda});
  return result;
}

constexpr std::array kBackends{Backend::reference, Backend::cpu, Backend::cuda};

void print_text() {
  fmt::print("winnow {}\n\n", version());
  Table backends({"<backend", "<usable", "<"});
  for (const Backend backend : kBackends)
    backends.add({std::string(name(backend)), usable(backend) ? "yes" : "no",
                  usable(backend) ? describe(backend) : why_not(backend)});
  fmt::print("{}\n", backends.text());

  Table devices({"<device", "<", "<automatic takes"});
  for (const Place& place : places()) {
    std::string taken(name(place.automatic));
    if (place.automatic == Backend::reference) taken += ", as there is no faster one here";
    devices.add({place.device, place.what, taken});
  }
  fmt::print("{}", devices.text());
}

void print_json() {
  nlohmann::ordered_json backends = nlohmann::json::array();
  for (const Backend backend : kBackends) {
    nlohmann::ordered_json entry{{"name", name(backend)}, {"usable", usable(backend)}};
    entry[usable(backend) ? "runs_on" : "why_not"] =
        usable(backend) ? describe(backend) : why_not(backend);
    backends.push_back(std::move(entry));
  }
  nlohmann::ordered_json devices = nlohmann::json::array();
  for (const Place& place : places())
    devices.push_back(
        {{"device", place.device}, {"what", place.what}, {"automatic", name(place.automatic)}});
  const nlohmann::ordered_json all{
      {"version", version()}, {"backends", backends}, {"devices", devices}};
  fmt::print("{}\n", all.dump(2));
}

}  // namespace

void add_info(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand("info", "Version, backends and devices.");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON.");
  command->callback([json] { *json ? print_json() : print_text(); });
}

}  // namespace winnow::tools
