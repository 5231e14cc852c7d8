/* module.c: the Python module native._native: segment_tree.h and gather.h, with arrays as buffers.
 *
 * It is thin: it checks that an array is what C will read (one dimension, contiguous, aligned, of the
 * right type), calls, and raises Refused with the row that C refuses. What to say about that row is
 * left to Python. Only the limited API is used, so that one file serves every Python from 3.11 on.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "gather.h"
#include "segment_tree.h"
#include "time_calls.h"

typedef struct {
    PyObject_HEAD
    segment_tree *tree;
} TreeObject;

static PyObject *Refused, *Unfit;

/* The most arrays that one call takes. */
#define MAX_ARRAYS 4

/* Input: an object and what its elements must be: 'i' int64, 'u' uint64, 'f' float64, 'b' bytes of any
 * shape. Result: 0 and a buffer, to be released by the caller, or -1 and an exception. An empty array may
 * lie anywhere. */
static int open_array(PyObject *object, char type, int writable, Py_buffer *view)
{
    const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) != 0) {
        PyErr_Clear();
        PyErr_SetString(Unfit, "not an array that C can use");
        return -1;
    }
    const char *formats = type == 'i' ? "lq" : type == 'u' ? "LQ" : "d";
    int fits = type == 'b' || (view->ndim == 1 && view->itemsize == 8 && strlen(view->format) == 1 &&
                               strchr(formats, view->format[0]) != NULL &&
                               (view->len == 0 || (uintptr_t)view->buf % 8 == 0));
    if (fits)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(Unfit, "not a one-dimensional array of the type that C wants");
    return -1;
}

static void close_arrays(Py_buffer *views, int count)
{
    while (count-- > 0)
        PyBuffer_Release(&views[count]);
}

/* Input: buffers. Result: whether one that is written to shares memory with another: C could then read
 * what it has just written, as a slot even. */
static int overlap(const Py_buffer *views, int count)
{
    for (int i = 0; i < count; i++)
        for (int j = i + 1; j < count; j++) {
            const char *a = views[i].buf, *b = views[j].buf;
            int apart = a + views[i].len <= b || b + views[j].len <= a;
            if (!apart && !(views[i].readonly && views[j].readonly))
                return 1;
        }
    return 0;
}

/* Input: the arguments of a call, and a letter for each as in open_array, upper case where written to.
 * Result: 0 and as many buffers, all of one length but for 'U' and 'b', or -1 and an exception. */
static int open_arrays(PyObject *const *args, Py_ssize_t nargs, const char *types, Py_buffer *views)
{
    int count = (int)strlen(types), first = types[0] == 'U';
    if (nargs != count) {
        PyErr_Format(PyExc_TypeError, "takes %d arrays, got %zd", count, nargs);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        int writable = types[i] < 'a';
        if (open_array(args[i], (char)(types[i] | 0x20), writable, &views[i]) != 0) {
            close_arrays(views, i);
            return -1;
        }
        if (views[i].len != views[first < i ? first : i].len || (types[i] == 'U' && views[i].len != 8)) {
            close_arrays(views, i + 1);
            PyErr_SetString(Unfit, "arrays of different lengths");
            return -1;
        }
    }
    if (types[count - 1] < 'a' && overlap(views, count)) {
        close_arrays(views, count);
        PyErr_SetString(Unfit, "arrays that share memory");
        return -1;
    }
    return 0;
}

/* Input: what a call returned and its buffers. Result: they are released; None, or NULL and Refused. */
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

/* time_calls(op, k, cold_bytes, seed, slots, mass, us): see time_calls.h; us is float64[calls]. */
static PyObject *tree_time_calls(TreeObject *self, PyObject *args)
{
    const char *op;
    long long k, cold_bytes;
    unsigned long long seed;
    PyObject *arrays[3];
    Py_buffer v[3];
    if (!PyArg_ParseTuple(args, "sLLKOOO:time_calls", &op, &k, &cold_bytes, &seed, &arrays[0], &arrays[1], &arrays[2]))
        return NULL;
    if (open_arrays(arrays, 2, "if", v) != 0)
        return NULL;
    if (open_array(arrays[2], 'f', 1, &v[2]) != 0) {
        close_arrays(v, 2);
        return NULL;
    }
    int failed = time_calls(self->tree, op, k, cold_bytes, seed, v[0].buf, v[1].buf, ROWS(v[0]), v[2].buf, ROWS(v[2]));
    close_arrays(v, 3);
    if (failed) {
        PyErr_Format(PyExc_ValueError, "cannot time %s of %lld rows", op, k);
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

#define FAST(name) {#name, (PyCFunction)(void (*)(void))tree_##name, METH_FASTCALL, NULL}

static PyMethodDef tree_methods[] = {
    FAST(set), FAST(set_range), FAST(get), FAST(find_prefix), FAST(draw), FAST(save), FAST(load), FAST(check),
    {"binary_form", (PyCFunction)tree_binary_form, METH_VARARGS, NULL},
    {"time_calls", (PyCFunction)tree_time_calls, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tree_getters[] = {
    {"total", (getter)tree_total, NULL, NULL, NULL},
    {"minimum", (getter)tree_minimum, NULL, NULL, NULL},
    {"nbytes", (getter)tree_nbytes, NULL, NULL, NULL},
    {"backend", (getter)tree_backend, NULL, NULL, NULL},
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

static PyObject *module_use_host(PyObject *module, PyObject *args)
{
    (void)module, (void)args;
    segment_tree_use_host();
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"use_host", module_use_host, METH_NOARGS, NULL},
    {"gather_rows", module_gather_rows, METH_VARARGS, NULL},
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
