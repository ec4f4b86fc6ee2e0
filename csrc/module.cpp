// SPDX-License-Identifier: Apache-2.0
// The Python module object of _C: importing it runs the op registrations, it has no functions.
#include <Python.h>

PyMODINIT_FUNC PyInit__C(void) {
    static PyModuleDef def = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
    return PyModule_Create(&def);
}
