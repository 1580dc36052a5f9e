//! The disk export as processes of its own: a server that answers QEMU ([`serve`]), and a
//! supervisor that keeps one server answering until the disk is taken back ([`Supervisor`]).
//!
//! ```text
//! owner ──control──▶ supervisor: holds the listening socket, and the image's locks
//!                       │ starts, receives heartbeats, kills
//!                       ▼
//!                    server: has the turn ──▶ image          QEMU ──nbd──▶ server
//! ```
//!
//! Only one of all processes has the [`Turn`] to answer: QEMU repeats unanswered requests at the
//! next server, and the first attempt must not overtake the repetition. Any of them may be killed
//! at any time. docs/decisions/0014-a-supervisor-below-the-disk.md has the reasons.

pub mod arriving;
mod control;
mod folder;
mod heart;
mod message;
mod processes;
mod server;
mod supervisor;
pub mod telling;
pub mod tracking;
mod turn;
mod watched;

pub use arriving::arriving;
pub use control::{Control, ControlError, Status};
pub use folder::{Fetched, FolderError, FrontFolder, FrontSpec};
pub use heart::INTERVAL as BEAT_INTERVAL;
pub use server::{ServeError, pass_through, serve};
pub use supervisor::{Event, Policy, Programs, Supervisor, SupervisorError};
pub use telling::telling;
pub use tracking::tracking;
pub use turn::{Turn, TurnError};
