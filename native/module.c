/* module.c: the Python module native._native: segment_tree.h, gather.h and within.h, with arrays as buffers.
 *
 * It is thin: it checks that an array is what C will read (one dimension, contiguous, aligned, of the
 * right type), calls, and raises Refused with the row that C refuses. Python words the
 * message. Only the limited API is used, so that one file serves every Python from 3.11 on.
 */
#include "arrays.h"
#include "gather.h"
#include "segment_tree.h"
#include "within.h"

typedef struct {
    PyObject_HEAD
    segment_tree *tree;
} TreeObject;

static PyObject *Refused;

/* Input: the result of a call and its buffers. Result: releases them; None, or NULL and Refused. */
static PyObject *finish(int64_t row, Py_buffer *views, int count)
{
    close_arrays(views, count);
    if (row < 0)
        Py_RETURN_NONE;
    PyObject *number = PyLong_FromLongLong(row);
    if (number != NULL)
        PyErr_SetObject(Refused, number);
    Py_XDECREF(number);
    return NULL;
}

/* As finish, but total and minimum in place of None. */
static PyObject *finish_update(const segment_tree *tree, int64_t row, Py_buffer *views, int count)
{
    PyObject *none = finish(row, views, count);
    if (none == NULL)
        return NULL;
    Py_DECREF(none);
    return Py_BuildValue("(dd)", segment_tree_total(tree), segment_tree_minimum(tree));
}

#define ROWS(view) ((view).len / 8)

static PyObject *tree_set(TreeObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer v[MAX_ARRAYS];
    if (open_arrays(args, nargs, "if", v) != 0)
        return NULL;
    return finish_update(self->tree, segment_tree_set(self->tree, v[0].buf, v[1].buf, ROWS(v[0])), v, 2);
}

static PyObject *tree_set_range(TreeObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer v[MAX_ARRAYS];
    int64_t first = nargs > 0 ? PyLong_AsLongLong(args[0]) : -1;
    if (PyErr_Occurred() || open_arrays(args + 1, nargs - 1, "f", v) != 0)
        return NULL;
    return finish_update(self->tree, segment_tree_set_range(self->tree, first, v[0].buf, ROWS(v[0])), v, 1);
}

static PyObject *tree_get(TreeObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer v[MAX_ARRAYS];
    if (open_arrays(args, nargs, "iF", v) != 0)
        return NULL;
    return finish(segment_tree_get(self->tree, v[0].buf, v[1].buf, ROWS(v[0])), v, 2);
}

static PyObject *tree_find_prefix(TreeObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer v[MAX_ARRAYS];
    if (open_arrays(args, nargs, "fIF", v) != 0)
        return NULL;
    return finish(segment_tree_find_prefix(self->tree, v[0].buf, v[1].buf, v[2].buf, ROWS(v[0])), v, 3);
}

/* draw(k, state, slots, mass, probability): the last three are of length k. */
static PyObject *tree_draw(TreeObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer v[MAX_ARRAYS];
    int64_t k = nargs > 0 ? PyLong_AsLongLong(args[0]) : -1;
    if (PyErr_Occurred() || open_arrays(args + 1, nargs - 1, "UIFF", v) != 0)
        return NULL;
    if (ROWS(v[1]) != k) {
        close_arrays(v, 4);
        PyErr_SetString(Unfit, "arrays of another length than the number of draws");
        return NULL;
    }
    return finish(segment_tree_draw(self->tree, v[0].buf, v[1].buf, v[2].buf, v[3].buf, ROWS(v[1])), v, 4);
}

/* The one array of save and load: of float64, one for each slot. */
static int open_masses(TreeObject *self, PyObject *const *args, Py_ssize_t nargs, const char *type, Py_buffer *view)
{
    if (open_arrays(args, nargs, type, view) != 0)
        return -1;
    if (ROWS(*view) == segment_tree_capacity(self->tree))
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(Unfit, "not a mass for each slot");
    return -1;
}

static PyObject *tree_save(TreeObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer v[MAX_ARRAYS];
    if (open_masses(self, args, nargs, "F", v) != 0)
        return NULL;
    segment_tree_save(self->tree, v[0].buf);
    return finish(-1, v, 1);
}

static PyObject *tree_load(TreeObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer v[MAX_ARRAYS];
    if (open_masses(self, args, nargs, "f", v) != 0)
        return NULL;
    return finish_update(self->tree, segment_tree_load(self->tree, v[0].buf), v, 1);
}

static PyObject *tree_check(TreeObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)args, (void)nargs;
    return PyLong_FromLongLong(segment_tree_check(self->tree));
}

static PyObject *tree_binary_form(TreeObject *self, PyObject *args)
{
    int form;
    long long crossover;
    if (!PyArg_ParseTuple(args, "iL:binary_form", &form, &crossover))
        return NULL;
    if (segment_tree_binary_form(self->tree, form, crossover) != 0) {
        PyErr_SetString(PyExc_ValueError, "not a binary tree, or not a form of it");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *tree_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    char *names[] = {"kind", "capacity", "alpha", "portable", NULL};
    int kind, portable = 0;
    long long capacity;
    double alpha = 0.0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iL|dp:Tree", names, &kind, &capacity, &alpha, &portable))
        return NULL;
    TreeObject *self = (TreeObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->tree = segment_tree_create(kind, capacity, alpha, portable);
    if (self->tree == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void tree_dealloc(TreeObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    segment_tree_destroy(self->tree);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *tree_total(TreeObject *self, void *closure)
{
    (void)closure;
    return PyFloat_FromDouble(segment_tree_total(self->tree));
}

static PyObject *tree_minimum(TreeObject *self, void *closure)
{
    (void)closure;
    return PyFloat_FromDouble(segment_tree_minimum(self->tree));
}

static PyObject *tree_nbytes(TreeObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromLongLong(segment_tree_bytes(self->tree));
}

static PyObject *tree_backend(TreeObject *self, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(segment_tree_backend(self->tree));
}

/* The address of the segment_tree, for C code that calls it (timing.py). */
static PyObject *tree_address(TreeObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromVoidPtr(self->tree);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))tree_##name, METH_FASTCALL, NULL}

static PyMethodDef tree_methods[] = {
    FAST(set), FAST(set_range), FAST(get), FAST(find_prefix), FAST(draw), FAST(save), FAST(load), FAST(check),
    {"binary_form", (PyCFunction)tree_binary_form, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tree_getters[] = {
    {"total", (getter)tree_total, NULL, NULL, NULL},
    {"minimum", (getter)tree_minimum, NULL, NULL, NULL},
    {"nbytes", (getter)tree_nbytes, NULL, NULL, NULL},
    {"backend", (getter)tree_backend, NULL, NULL, NULL},
    {"address", (getter)tree_address, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot tree_slots[] = {
    {Py_tp_doc, "Tree(kind, capacity, alpha=0.0, portable=False): a tree of segment_tree.h."},
    {Py_tp_new, tree_new},
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_methods, tree_methods},
    {Py_tp_getset, tree_getters},
    {0, NULL},
};

static PyType_Spec tree_spec = {"native._native.Tree", sizeof(TreeObject), 0, Py_TPFLAGS_DEFAULT, tree_slots};

/* gather_rows(base, offset, row_bytes, out): see gather.h. Every row read and written is checked. */
static PyObject *module_gather_rows(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *arrays[3];
    Py_ssize_t row_bytes;
    if (!PyArg_ParseTuple(args, "OOnO:gather_rows", &arrays[0], &arrays[1], &row_bytes, &arrays[2]))
        return NULL;
    Py_buffer v[3];
    const char types[] = "bib";
    for (int i = 0; i < 3; i++)
        if (open_array(arrays[i], types[i], i == 2, &v[i]) != 0) {
            close_arrays(v, i);
            return NULL;
        }
    if (overlap(v, 3)) {
        close_arrays(v, 3);
        PyErr_SetString(Unfit, "arrays that share memory");
        return NULL;
    }
    int64_t k = ROWS(v[1]), bad = row_bytes >= 0 && v[2].len / (row_bytes ? row_bytes : 1) >= k ? -1 : k;
    for (int64_t row = 0; row < k && bad < 0; row++)
        if (((const int64_t *)v[1].buf)[row] >= 0 && ((const int64_t *)v[1].buf)[row] > v[0].len - row_bytes)
            bad = row;
    if (bad < 0)
        gather_rows(v[0].buf, v[1].buf, k, row_bytes, v[2].buf);
    return finish(bad, v, 3);
}

/* within(array, low, high): see within.h; the array is of int16, int32 or float32, contiguous, of any shape. */
static PyObject *module_within(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *array;
    double low, high;
    Py_buffer v;
    if (!PyArg_ParseTuple(args, "Odd:within", &array, &low, &high) || open_numbers(array, &v) != 0)
        return NULL;
    int within = v.format[0] == 'h'   ? within_int16(v.buf, v.len / 2, low, high)
                 : v.format[0] == 'i' ? within_int32(v.buf, v.len / 4, low, high)
                                      : within_float32(v.buf, v.len / 4, low, high);
    PyBuffer_Release(&v);
    return PyBool_FromLong(within);
}

static PyObject *module_use_host(PyObject *module, PyObject *args)
{
    (void)module, (void)args;
    segment_tree_use_host();
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"use_host", module_use_host, METH_NOARGS, NULL},
    {"gather_rows", module_gather_rows, METH_VARARGS, NULL},
    {"within", module_within, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "native._native", NULL, -1, module_methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    Refused = PyErr_NewException("native.Refused", PyExc_ValueError, NULL);
    Unfit = PyErr_NewException("native.Unfit", PyExc_TypeError, NULL);
    PyObject *tree = PyType_FromSpec(&tree_spec);
    if (PyModule_AddObjectRef(module, "Refused", Refused) != 0 || PyModule_AddObjectRef(module, "Unfit", Unfit) != 0 ||
        PyModule_AddObjectRef(module, "Tree", tree) != 0 ||
        PyModule_AddIntConstant(module, "FOR_DEVICE", segment_tree_for_device()) != 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
