//! Statements as text, for instructions that cubecl does not offer.
//!
//! cubecl emits comments verbatim, so the text ends the comment, continues with statements, and begins a
//! comment again. Statements only name local arrays, shared memory and buffers, whose names do not depend on
//! the surrounding code.

use cubecl::ir::{ManagedVariable, NonSemantic, Scope, VariableKind};

/// Emits `statements` after a comment that says what they are.
pub fn emit(scope: &mut Scope, comment: &str, statements: &str) {
    let content = format!("{comment}:\n*/\n{statements}\n/*");
    scope.register(NonSemantic::Comment { content });
}

/// The name of a local array, a shared memory or a buffer in the generated code.
///
/// # Panics
/// For other variables.
pub fn name_of(variable: &ManagedVariable) -> String {
    match variable.kind {
        VariableKind::LocalArray { id, .. } => format!("l_arr_{id}"),
        VariableKind::SharedArray { id, .. } | VariableKind::Shared { id } => {
            format!("shared_memory_{id}")
        }
        VariableKind::GlobalInputArray(id) | VariableKind::GlobalOutputArray(id) => {
            format!("buffer_{id}")
        }
        kind => panic!("{kind:?} has no name"),
    }
}
