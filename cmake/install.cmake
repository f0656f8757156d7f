# SPDX-License-Identifier: Apache-2.0
# Installation of the libraries for C++ programs: find_package(winnow) gives winnow::winnow and
# winnow::mpi, pkg-config knows winnow and winnow_mpi. The tool is installed where it is built.
#   cmake --install BUILD --prefix DIR [--component winnow]   the component leaves out the tool

# The wheel holds the library as one file, which the Python package opens by its name.
if(SKBUILD)
  install(TARGETS winnow LIBRARY DESTINATION winnow)
  return()
endif()

set(installed_targets winnow)
set(pkg_config_names winnow)
if(WINNOW_MPI)
  list(APPEND installed_targets winnow_mpi)
  list(APPEND pkg_config_names winnow_mpi)
else()
  set(left_out PATTERN mpi.h EXCLUDE)
endif()
# Before 1.0 a minor version may change structs that callers fill in.
set_target_properties(${installed_targets} PROPERTIES
  VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

install(DIRECTORY include/winnow TYPE INCLUDE COMPONENT winnow ${left_out})
install(TARGETS ${installed_targets} EXPORT winnow_targets COMPONENT winnow)

include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/winnow)
install(EXPORT winnow_targets
  FILE winnowTargets.cmake NAMESPACE winnow:: DESTINATION ${package_folder} COMPONENT winnow)
configure_file(cmake/winnowConfig.cmake.in ${PROJECT_BINARY_DIR}/winnowConfig.cmake @ONLY)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/winnowConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/winnowConfig.cmake ${PROJECT_BINARY_DIR}/winnowConfigVersion.cmake
  DESTINATION ${package_folder} COMPONENT winnow)

# Relative to the file, since --prefix may say another place than the build was configured for.
file(RELATIVE_PATH prefix_from_pkg_config
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
foreach(name IN LISTS pkg_config_names)
  configure_file(cmake/${name}.pc.in ${PROJECT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT winnow)
endforeach()
