//! The front end of a disk as processes of their own: a server that answers QEMU ([`serve`]), and a
//! supervisor that keeps one answering until the disk is taken back ([`Supervisor`]).
//!
//! ```text
//! owner ──control──▶ supervisor: holds the listening socket, and the image's locks
//!                       │ starts, listens to its heart, kills
//!                       ▼
//!                    server: has the turn ──▶ image          QEMU ──nbd──▶ server
//! ```
//!
//! Of all processes only one has the [`Turn`] to answer: QEMU repeats to the next server what it had
//! no answer to, and must not be overtaken by the first try. Each of them may be killed at any time.
//! Why it is so: docs/decisions/0014-a-supervisor-below-the-disk.md.

pub mod arriving;
mod control;
mod folder;
mod heart;
mod message;
mod processes;
mod server;
mod supervisor;
pub mod telling;
mod turn;

pub use arriving::arriving;
pub use control::{Control, ControlError, Status};
pub use folder::{Fetched, FolderError, FrontFolder, FrontSpec};
pub use heart::INTERVAL as BEAT_INTERVAL;
pub use server::{ServeError, pass_through, serve};
pub use supervisor::{Event, Policy, Programs, Supervisor, SupervisorError};
pub use telling::telling;
pub use turn::{Turn, TurnError};
